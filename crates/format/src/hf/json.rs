//! JSON and text files of a bounded size, with errors that name the file and the line.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::error::Error;
use crate::limits;

/// The size of a file; `None` when there is none. Refuses more than `limit` bytes, and what is not a
/// regular file.
pub(super) fn size_optional(path: &Path, limit: u64) -> Result<Option<u64>, Error> {
    let meta = match fs::metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(path, e)),
    };
    if !meta.is_file() {
        let found = if meta.is_dir() { "a directory" } else { "a pipe or device" };
        return Err(Error::NotAFile { file: path.to_owned(), found });
    }
    if meta.len() > limit {
        let what = "the size in bytes".to_owned();
        return Err(Error::Limit { file: path.to_owned(), what, found: meta.len(), limit });
    }
    Ok(Some(meta.len()))
}

fn bytes_optional(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, Error> {
    if size_optional(path, limit)?.is_none() {
        return Ok(None);
    }
    let bytes = fs::read(path).map_err(|e| Error::io(path, e))?;
    if bytes.is_empty() {
        return Err(Error::Empty { file: path.to_owned() });
    }
    Ok(Some(bytes))
}

/// A file of UTF-8 text; `None` when there is none.
pub(super) fn text_optional(path: &Path, limit: u64) -> Result<Option<String>, Error> {
    let Some(bytes) = bytes_optional(path, limit)? else { return Ok(None) };
    let not_utf8 = |_| Error::NotUtf8 { file: path.to_owned(), what: "the text".to_owned() };
    String::from_utf8(bytes).map(Some).map_err(not_utf8)
}

/// A JSON file; `None` when there is none.
pub(super) fn read_optional(path: &Path, limit: u64) -> Result<Option<serde_json::Value>, Error> {
    let Some(bytes) = bytes_optional(path, limit)? else { return Ok(None) };
    let values = bytes.iter().filter(|b| matches!(b, b',' | b'[' | b'{')).count();
    if values > limits::MAX_JSON_VALUES {
        return Err(Error::Limit {
            file: path.to_owned(),
            what: "the number of values".to_owned(),
            found: values as u64,
            limit: limits::MAX_JSON_VALUES as u64,
        });
    }
    parse(path, &bytes).map(Some)
}

/// JSON into a type that bounds its own memory.
pub(super) fn read_typed<T: DeserializeOwned>(path: &Path, limit: u64) -> Result<T, Error> {
    let bytes = bytes_optional(path, limit)?;
    let missing = || Error::io(path, ErrorKind::NotFound.into());
    parse(path, &bytes.ok_or_else(missing)?)
}

fn parse<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, Error> {
    check_strings(path, bytes)?;
    serde_json::from_slice(bytes).map_err(|e| Error::Json {
        file: path.to_owned(),
        line: e.line(),
        column: e.column(),
        reason: reason(&e),
    })
}

/// Refuses JSON with a string that is longer than it should be.
pub(super) fn check_strings(path: &Path, json: &[u8]) -> Result<(), Error> {
    let mut bytes = json.iter();
    while bytes.by_ref().any(|&b| b == b'"') {
        let start = bytes.len();
        let mut escaped = false;
        while let Some(&b) = bytes.next()
            && (b != b'"' || escaped)
        {
            escaped = b == b'\\' && !escaped;
        }
        let len = start - bytes.len();
        if len > limits::MAX_JSON_STRING {
            return Err(Error::Limit {
                file: path.to_owned(),
                what: "the length of a string".to_owned(),
                found: len as u64,
                limit: limits::MAX_JSON_STRING as u64,
            });
        }
    }
    Ok(())
}

/// serde_json's message without the line and column that it ends with.
pub(super) fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    crate::error::shown(text.strip_suffix(&place).unwrap_or(&text))
}
