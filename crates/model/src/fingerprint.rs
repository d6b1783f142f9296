//! Which model a file is, in 128 bits, so that what was saved with one model is not loaded into another.

use std::fmt;

use serde_json::Value as Json;
use xxhash_rust::xxh3::Xxh3;

use crate::checkpoint::Checkpoint;
use crate::error::ModelError;

/// Bytes of each tensor that are looked at.
const SAMPLE: usize = 4096;

/// Identifies a model: its settings, the names, types and shapes of all its tensors, and the first 4 KiB of
/// each. The tokenizer, the template and the place of the file do not count. Two checkpoints of one model in
/// different formats or types are different models, since their numbers differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 16]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A hash of fields: each is preceded by its length, so that no two lists of fields run into the same bytes.
struct Fields(Xxh3);

impl Fields {
    fn add(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    fn tensor(&mut self, name: &str, ty: &str, shape: &[usize], data: &[u8]) {
        self.add(name.as_bytes());
        self.add(ty.as_bytes());
        self.add(format!("{shape:?}").as_bytes());
        self.add(&data[..data.len().min(SAMPLE)]);
    }

    /// Whatever the order of an object's keys in the file.
    fn json(&mut self, value: &Json) {
        match value {
            Json::Object(map) => {
                let mut pairs: Vec<_> = map.iter().filter(|(key, _)| !is_note(key)).collect();
                pairs.sort_by_key(|pair| pair.0);
                self.add(format!("object {}", pairs.len()).as_bytes());
                for (key, value) in pairs {
                    self.add(key.as_bytes());
                    self.json(value);
                }
            }
            Json::Array(items) => {
                self.add(format!("array {}", items.len()).as_bytes());
                items.iter().for_each(|item| self.json(item));
            }
            other => self.add(other.to_string().as_bytes()),
        }
    }
}

/// Keys of `config.json` that say where a file came from, not what it computes.
fn is_note(key: &str) -> bool {
    key.starts_with('_') || key == "transformers_version"
}

impl Checkpoint {
    /// See [`Fingerprint`]. Reads at most 4 KiB of each tensor.
    ///
    /// # Errors
    /// The file is damaged or cannot be read.
    pub fn fingerprint(&self) -> Result<Fingerprint, ModelError> {
        let mut fields = Fields(Xxh3::new());
        match self {
            Checkpoint::Gguf(g) => {
                let arch = self.architecture()?;
                fields.add(arch.as_bytes());
                let prefix = format!("{arch}.");
                let mut settings: Vec<_> = g.metadata().iter().filter(|m| m.0.starts_with(&prefix)).collect();
                settings.sort_by_key(|setting| setting.0);
                settings.iter().for_each(|(key, value)| fields.add(format!("{key} {value:?}").as_bytes()));
                let mut tensors: Vec<_> = g.tensors().iter().collect();
                tensors.sort_by_key(|t| &t.name);
                for t in tensors {
                    let data = g.data(&t.name)?;
                    fields.tensor(&t.name, &t.ty.to_string(), &t.shape, &data);
                    data.release();
                }
            }
            Checkpoint::Hf(d) => {
                fields.json(d.config());
                let mut tensors: Vec<_> = d.tensors().collect();
                tensors.sort_by_key(|t| &t.name);
                for t in tensors {
                    let data = d.raw(&t.name)?;
                    fields.tensor(&t.name, &format!("{:?}", t.dtype), &t.shape, &data);
                    data.release();
                }
            }
            // Its weights follow from these.
            Checkpoint::Shape(s) => fields.add(format!("{s} {}", s.seed).as_bytes()),
        }
        Ok(Fingerprint(fields.0.digest128().to_le_bytes()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use minfer_format::gguf::Value;
    use minfer_format::{BlockType, Gguf, GgufWriter, TensorBytes, bytes::AlignedBuf};
    use serde_json::json;

    use super::*;

    /// A file with one setting, one word of its tokenizer, and two tensors.
    fn gguf(setting: u32, word: &str, name: &str, shape: &[usize], at: usize) -> Fingerprint {
        let mut writer = GgufWriter::new();
        writer.set("general.architecture", Value::String("llama".to_string()));
        writer.set("llama.block_count", Value::U32(setting));
        writer.set("tokenizer.ggml.model", Value::String(word.to_string()));
        let mut data = vec![0u8; 4 * 2048];
        data[at] = 1;
        writer.tensor("a", BlockType::F32, &[4], &[0; 16]).unwrap();
        writer.tensor(name, BlockType::F32, shape, &data).unwrap();
        let bytes = TensorBytes::from(AlignedBuf::from(&writer.to_bytes()[..]));
        Checkpoint::Gguf(Gguf::from_bytes("x", bytes).unwrap()).fingerprint().unwrap()
    }

    #[test]
    fn every_setting_and_every_tensor_counts() {
        let one = gguf(1, "gpt2", "b", &[2, 1024], 0);
        assert_eq!(one, gguf(1, "gpt2", "b", &[2, 1024], 0));
        assert_eq!(one, gguf(1, "llama", "b", &[2, 1024], 0), "the tokenizer does not count");
        for other in [
            gguf(2, "gpt2", "b", &[2, 1024], 0),
            gguf(1, "gpt2", "c", &[2, 1024], 0),
            gguf(1, "gpt2", "b", &[1024, 2], 0),
            gguf(1, "gpt2", "b", &[2, 1024], SAMPLE - 1),
        ] {
            assert_ne!(one, other);
        }
        let [late, later] = [SAMPLE, SAMPLE + 1].map(|at| gguf(1, "gpt2", "b", &[2, 1024], at));
        assert_eq!(late, later, "no more than the sample is read");
    }

    #[test]
    fn the_order_of_keys_does_not_count() {
        let hash = |value: Json| {
            let mut fields = Fields(Xxh3::new());
            fields.json(&value);
            fields.0.digest128()
        };
        let one = hash(json!({"a": 1, "b": {"c": [1, 2], "d": null}, "transformers_version": "5"}));
        assert_eq!(one, hash(json!({"b": {"d": null, "c": [1, 2]}, "a": 1})));
        for other in [
            json!({"a": 1, "b": {"c": [2, 1], "d": null}}),
            json!({"a": 1, "b": {"c": [1, 2]}, "d": null}),
            json!({"a": 2, "b": {"c": [1, 2], "d": null}}),
        ] {
            assert_ne!(one, hash(other));
        }
    }
}
