//! Metadata: keys in the order of the file, with typed access.
//!
//! A getter accepts every type that holds the wanted one without loss (any integer type whose value fits,
//! either float type for `f32`), and names the file and the key when it refuses. Its `opt_` twin gives
//! `None` for an absent key, and still refuses a wrong type.

use std::path::{Path, PathBuf};

use crate::error::{Error, shown};

use super::value::{Array, Value};

/// An ordered map from keys to values.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    file: PathBuf,
    pairs: Vec<(String, Value)>,
    /// Indices of `pairs` in the order of their keys.
    by_key: Vec<u32>,
}

impl Metadata {
    /// The pairs of a file; a key that occurs twice is refused.
    pub fn new(file: &Path, pairs: Vec<(String, Value)>) -> Result<Metadata, Error> {
        let mut by_key: Vec<u32> = (0..pairs.len() as u32).collect();
        by_key.sort_by_key(|&i| pairs[i as usize].0.as_str());
        if let Some(twice) = by_key.windows(2).find(|w| pairs[w[0] as usize].0 == pairs[w[1] as usize].0) {
            let key = shown(&pairs[twice[0] as usize].0);
            return Err(Error::DuplicateKey { file: file.to_owned(), key });
        }
        Ok(Metadata { file: file.to_owned(), pairs, by_key })
    }

    /// The file that errors name.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let place = self.by_key.binary_search_by(|&i| self.pairs[i as usize].0.as_str().cmp(key)).ok()?;
        Some(&self.pairs[self.by_key[place] as usize].1)
    }

    /// All pairs, in the order of the file.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.pairs.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    fn opt<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        cast: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong = || Error::WrongKeyType {
            file: self.file.clone(),
            key: shown(key),
            expected,
            found: value.describe(),
        };
        cast(value).map(Some).ok_or_else(wrong)
    }

    fn missing(&self, key: &str) -> Error {
        Error::MissingKey { file: self.file.clone(), key: shown(key) }
    }
}

/// One line per type: the getter, its `opt_` twin, the Rust type, its name in messages, the conversion.
macro_rules! getters {
    ($($name:ident $opt:ident $ty:ty, $expected:literal, $cast:expr;)*) => {
        impl Metadata {
            $(
                #[doc = concat!("The value of a key that must be there and be ", $expected, ".")]
                pub fn $name(&self, key: &str) -> Result<$ty, Error> {
                    self.$opt(key)?.ok_or_else(|| self.missing(key))
                }

                #[doc = concat!("The value of a key that may be absent, and else must be ", $expected, ".")]
                pub fn $opt(&self, key: &str) -> Result<Option<$ty>, Error> {
                    self.opt(key, $expected, $cast)
                }
            )*
        }
    };
}

getters! {
    string opt_string &str, "a string", Value::as_str;
    bool opt_bool bool, "a boolean", Value::as_bool;
    u32 opt_u32 u32, "an integer that fits u32", |v| v.as_i128()?.try_into().ok();
    i32 opt_i32 i32, "an integer that fits i32", |v| v.as_i128()?.try_into().ok();
    u64 opt_u64 u64, "an integer that fits u64", |v| v.as_i128()?.try_into().ok();
    usize opt_usize usize, "an integer that fits usize", |v| v.as_i128()?.try_into().ok();
    f32 opt_f32 f32, "a float", |v| v.as_f64().map(|x| x as f32);
    array opt_array &Array, "an array", Value::as_array;
    strings opt_strings &[String], "an array of strings", strings_of;
    f32s opt_f32s &[f32], "an array of f32", f32s_of;
    bools opt_bools &[bool], "an array of booleans", bools_of;
    i32s opt_i32s Vec<i32>, "an array of integers that fit i32", |v| v.as_array()?.to_i32s();
}

fn strings_of(value: &Value) -> Option<&[String]> {
    if let Value::Array(Array::String(v)) = value { Some(v) } else { None }
}

fn f32s_of(value: &Value) -> Option<&[f32]> {
    if let Value::Array(Array::F32(v)) = value { Some(v) } else { None }
}

fn bools_of(value: &Value) -> Option<&[bool]> {
    if let Value::Array(Array::Bool(v)) = value { Some(v) } else { None }
}

/// Metadata made in memory. A key that comes again replaces the value and keeps the first place.
impl FromIterator<(String, Value)> for Metadata {
    fn from_iter<I: IntoIterator<Item = (String, Value)>>(pairs: I) -> Metadata {
        let mut metadata = Metadata { file: PathBuf::from("(in memory)"), ..Metadata::default() };
        for (key, value) in pairs {
            match metadata.by_key.binary_search_by(|&i| metadata.pairs[i as usize].0.cmp(&key)) {
                Ok(place) => metadata.pairs[metadata.by_key[place] as usize].1 = value,
                Err(place) => {
                    metadata.by_key.insert(place, metadata.pairs.len() as u32);
                    metadata.pairs.push((key, value));
                }
            }
        }
        metadata
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Metadata {
        [
            ("a.count", Value::U8(7)),
            ("a.negative", Value::I64(-1)),
            ("a.eps", Value::F64(0.5)),
            ("a.ids", Value::Array(Array::U64(vec![1, 2, 1 << 40]))),
            ("a.small", Value::Array(Array::I8(vec![-1, 2]))),
            ("a.name", Value::String("x".to_owned())),
        ]
        .into_iter()
        .map(|(k, v)| (k.to_owned(), v))
        .collect()
    }

    #[test]
    fn integers_widen_and_never_wrap() {
        let m = sample();
        assert_eq!(m.u32("a.count").unwrap(), 7);
        assert_eq!(m.usize("a.count").unwrap(), 7);
        assert_eq!(m.i32("a.negative").unwrap(), -1);
        assert!(matches!(m.u64("a.negative"), Err(Error::WrongKeyType { found, .. }) if found == "i64 -1"));
        assert_eq!(m.i32s("a.small").unwrap(), [-1, 2]);
        assert!(matches!(m.i32s("a.ids"), Err(Error::WrongKeyType { .. })));
    }

    #[test]
    fn absent_and_wrong_are_different() {
        let m = sample();
        assert_eq!(m.f32("a.eps").unwrap(), 0.5);
        assert_eq!(m.opt_u32("b").unwrap(), None);
        assert!(matches!(m.u32("b"), Err(Error::MissingKey { key, .. }) if key == "b"));
        assert!(matches!(m.opt_f32("a.count"), Err(Error::WrongKeyType { .. })));
        assert_eq!(
            m.opt_u32("a.name").unwrap_err().to_string(),
            "(in memory): the key 'a.name' should be an integer that fits u32, it is string"
        );
    }

    #[test]
    fn a_repeated_key_replaces_in_memory_and_is_refused_in_a_file() {
        let pairs = || [("k", 1u32), ("l", 2), ("k", 3)].map(|(k, v)| (k.to_owned(), Value::U32(v)));
        let m: Metadata = pairs().into_iter().collect();
        assert_eq!(m.iter().collect::<Vec<_>>(), [("k", &Value::U32(3)), ("l", &Value::U32(2))]);
        let refused = Metadata::new(Path::new("f"), pairs().into());
        assert!(matches!(refused, Err(Error::DuplicateKey { key, .. }) if key == "k"));
    }
}
