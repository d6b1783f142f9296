//! Any bytes as a GGUF file: an error, or tensors that all lie inside the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use minfer_format::Gguf;
use minfer_format::bytes::AlignedBuf;

fuzz_target!(|data: &[u8]| {
    match Gguf::from_bytes("fuzz", AlignedBuf::from(data).into()) {
        Ok(gguf) => {
            for t in gguf.tensors() {
                let bytes = gguf.data(&t.name).expect("a listed tensor has data");
                assert_eq!(bytes.len(), t.n_bytes());
                assert_eq!(t.ty.row_bytes(t.row_len()).map(|row| row * t.rows()), Some(t.n_bytes()));
            }
            for (key, value) in gguf.metadata().iter() {
                assert_eq!(gguf.metadata().get(key).map(|v| v.describe()), Some(value.describe()));
            }
        }
        Err(error) => assert!(error.to_string().len() < 1000),
    }
});
