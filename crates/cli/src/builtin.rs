//! The model that runs when none is named: `minfer-nano`, embedded in the binary.

use minfer_model::Checkpoint;

use crate::error::Failure;

/// How messages name it.
pub(crate) const NAME: &str = "minfer-nano (built in)";

#[cfg(feature = "builtin-model")]
static BYTES: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/minfer-nano-Q8_0.gguf"));

/// Opens it.
#[cfg(feature = "builtin-model")]
pub(crate) fn open() -> Result<Checkpoint, Failure> {
    let gguf = minfer_format::Gguf::from_static(NAME, BYTES).map_err(minfer_model::ModelError::from)?;
    Ok(Checkpoint::Gguf(gguf))
}

/// There is none to open.
#[cfg(not(feature = "builtin-model"))]
pub(crate) fn open() -> Result<Checkpoint, Failure> {
    Err(Failure::NoModel)
}

#[cfg(all(test, feature = "builtin-model"))]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    /// The file that models/README.md describes, and small enough for a repository.
    #[test]
    fn is_the_described_file() {
        let hash: String = Sha256::digest(BYTES).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hash, "3b9df82ab34265bd23824c2c4fd41925c4f583ad26b32f9c9e2f8be354a13c90");
        assert!(BYTES.len() <= 32_000_000);
    }
}
