//! Models in several files, `NAME-00001-of-0000N.gguf`.
//!
//! The metadata says it: `split.count` parts, of which a file is number `split.no` (from 0), with
//! `split.tensors.count` tensors together. The names only say where the other parts lie. The first part
//! carries the model's metadata; the others repeat nothing but the `split.` keys, and where they do repeat
//! a key it must have the same value, else they are parts of another model.

use std::path::{Path, PathBuf};

use crate::bytes::TensorBytes;
use crate::error::{Error, shown};

use super::metadata::Metadata;
use super::read::{Budget, Parsed, parse};

const COUNT: &str = "split.count";
const NUMBER: &str = "split.no";
const TENSORS: &str = "split.tensors.count";

/// One opened and parsed file.
pub(super) struct NamedPart {
    pub(super) file: PathBuf,
    pub(super) bytes: TensorBytes,
    pub(super) parsed: Parsed,
}

impl NamedPart {
    pub(super) fn open(path: &Path, part: u32, budget: &mut Budget) -> Result<NamedPart, Error> {
        let bytes = TensorBytes::map(path)?;
        let parsed = parse(path, &bytes, part, budget)?;
        // All that the header says has been copied.
        bytes.release();
        Ok(NamedPart { file: path.to_owned(), bytes, parsed })
    }
}

/// The number of parts; `None` for a whole file.
pub(super) fn count(metadata: &Metadata) -> Result<Option<u16>, Error> {
    let count = metadata.opt_u64(COUNT)?.unwrap_or(0);
    match u16::try_from(count) {
        Ok(0 | 1) => Ok(None),
        Ok(count) => Ok(Some(count)),
        Err(_) => Err(Error::Limit {
            file: metadata.file().to_owned(),
            what: COUNT.to_owned(),
            found: count,
            limit: u16::MAX.into(),
        }),
    }
}

/// All parts in order, given the one (`named`, at `path`) that the user named.
pub(super) fn open_all(path: &Path, named: NamedPart, count: u16) -> Result<Vec<NamedPart>, Error> {
    let number = named.parsed.metadata.u64(NUMBER)?;
    let total = named.parsed.metadata.u64(TENSORS)?;
    let prefix = prefix(path, number, count)?;
    // The named part is parsed again at its place, so that its tensors carry the right part number.
    drop(named);

    let mut budget = Budget::default();
    let mut parts: Vec<NamedPart> = Vec::new();
    let mut tensors = 0;
    for i in 0..count {
        let file = path.with_file_name(format!("{prefix}{}", suffix(i.into(), count)));
        if !file.exists() {
            return Err(Error::MissingPart { file: path.to_owned(), count: count.into(), part: file });
        }
        let part = NamedPart::open(&file, i.into(), &mut budget)?;
        check_part(&part.parsed.metadata, parts.first().map(|p| &p.parsed.metadata), i, count, total)?;
        tensors += part.parsed.tensors.len() as u64;
        parts.push(part);
    }
    if tensors != total {
        return Err(wrong(path, "the number of tensors of all parts", total, tensors));
    }
    Ok(parts)
}

fn check_part(own: &Metadata, first: Option<&Metadata>, i: u16, count: u16, total: u64) -> Result<(), Error> {
    let file = own.file();
    for (key, expected) in [(COUNT, u64::from(count)), (NUMBER, u64::from(i)), (TENSORS, total)] {
        let found = own.u64(key)?;
        if found != expected {
            return Err(wrong(file, key, expected, found));
        }
    }
    let Some(first) = first else { return Ok(()) };
    // Each part may have its own alignment; everything else describes the model.
    let of_the_model = |key: &str| !key.starts_with("split.") && key != "general.alignment";
    for (key, value) in own.iter().filter(|(key, _)| of_the_model(key)) {
        if first.get(key) != Some(value) {
            let expected = first.get(key).map_or("absent".to_owned(), |v| v.describe());
            return Err(wrong(file, &format!("the key '{}'", shown(key)), expected, value.describe()));
        }
    }
    Ok(())
}

fn wrong(file: &Path, what: &str, expected: impl ToString, found: impl ToString) -> Error {
    Error::WrongPart {
        file: file.to_owned(),
        what: what.to_owned(),
        expected: expected.to_string(),
        found: found.to_string(),
    }
}

fn suffix(number: u64, count: u16) -> String {
    format!("-{:05}-of-{count:05}.gguf", number.saturating_add(1))
}

/// The name of the part at `path` without its suffix.
fn prefix(path: &Path, number: u64, count: u16) -> Result<String, Error> {
    let expected = suffix(number, count);
    let name = path.file_name().and_then(|n| n.to_str());
    match name.and_then(|n| n.strip_suffix(&expected)) {
        Some(prefix) => Ok(prefix.to_owned()),
        None => Err(Error::SplitName { file: path.to_owned(), count: count.into(), expected }),
    }
}
