//! What a template may expect of Python: `json.dumps`, `str` and `repr`.
//!
//! Models were trained on prompts that Python rendered, so `True`, `None`, floats and printed lists must
//! look as they do there.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, Output, State};

/// Nesting of values that are printed or dumped; the engine itself stops earlier for most.
const MAX_DEPTH: usize = 100;

/// `{{ value }}`: undefined is nothing, the rest is `str(value)`.
pub(super) fn format(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text).map_err(Error::from),
        None => out.write_str(&string(state, value)?).map_err(Error::from),
    }
}

/// `str(value)`.
pub(super) fn string(state: &State, value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None if value.is_undefined() => Ok(String::new()),
        None => {
            let mut out = String::new();
            repr(state, &mut out, value, 0)?;
            Ok(out)
        }
    }
}

/// The test `iterable`: unlike minijinja's, not for `none`, which templates tell apart by it.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

fn too_deep() -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a value is nested more than {MAX_DEPTH} deep"))
}

/// `repr(value)`. Each value costs one unit of fuel: a lazy list can be longer than any memory.
fn repr(state: &State, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    state.consume_fuel(1)?;
    if depth > MAX_DEPTH {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::None => out.push_str("None"),
        ValueKind::Number => number(out, value),
        ValueKind::String => quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (i, item) in value.try_iter()?.checked().enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                repr(state, out, &item?, depth + 1)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.checked().enumerate() {
                let key = key?;
                out.push_str(if i == 0 { "" } else { ", " });
                repr(state, out, &key, depth + 1)?;
                out.push_str(": ");
                repr(state, out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        _ => write!(out, "{value}").map_err(Error::from)?,
    }
    Ok(())
}

/// A string literal: single quotes unless only those occur inside.
fn quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if (c as u32) < 0x20 || c as u32 == 0x7F => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// Integers as they are, floats by Python's rule: the shortest digits that round-trip, with an exponent
/// below 1e-4 and from 1e16 on.
fn number(out: &mut String, value: &Value) {
    let float = if value.is_integer() { None } else { f64::try_from(value.clone()).ok() };
    let _ = match float {
        None => write!(out, "{value}"),
        Some(x) if x.is_nan() => write!(out, "nan"),
        Some(x) if x.is_infinite() => write!(out, "{}", if x > 0.0 { "inf" } else { "-inf" }),
        Some(x) if x != 0.0 && !(1e-4..1e16).contains(&x.abs()) => {
            let scientific = format!("{x:e}");
            let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(exponent) => ('-', exponent),
                None => ('+', exponent),
            };
            write!(out, "{digits}e{sign}{exponent:0>2}")
        }
        Some(x) => write!(out, "{x:?}"),
    };
}

/// The `tojson` filter of `transformers`, which is `json.dumps` without escapes for HTML.
pub(super) fn tojson(
    state: &State,
    value: &Value,
    ensure_ascii: Option<bool>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let indent = match kwargs.get::<Option<Value>>("indent")? {
        Some(indent) if !indent.is_none() => Some(indentation(&indent)?),
        _ => None,
    };
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let [item, key] = match separators.as_deref() {
        Some([item, key]) => [item.clone(), key.clone()],
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators must be two strings")),
        None => [if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()],
    };
    let ensure_ascii = ensure_ascii.or(kwargs.get("ensure_ascii")?).unwrap_or(false);
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let mut dump = Dump { state, out: String::new(), indent, item, key, ensure_ascii, sort_keys };
    dump.value(value, 0)?;
    Ok(dump.out)
}

/// A number of spaces or the text itself.
fn indentation(indent: &Value) -> Result<String, Error> {
    match indent.as_str() {
        Some(text) if text.len() <= 64 => Ok(text.to_owned()),
        Some(_) => Err(Error::new(ErrorKind::InvalidOperation, "the indent is too long")),
        None => Ok(" ".repeat(usize::try_from(indent.clone())?.min(64))),
    }
}

/// `json.dumps`.
struct Dump<'a, 'vm, 'env> {
    state: &'a State<'vm, 'env>,
    out: String,
    indent: Option<String>,
    item: String,
    key: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Dump<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        // Strings are charged by their length, everything else by its number.
        self.state.consume_fuel(1 + value.as_str().map_or(0, str::len) as u64 / 64)?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            ValueKind::Map => self.map(value, depth)?,
            kind => {
                let detail = format!("tojson cannot represent a value that is {kind}");
                return Err(Error::new(ErrorKind::BadSerialization, detail));
            }
        }
        Ok(())
    }

    fn number(&mut self, value: &Value) {
        let mut text = String::new();
        number(&mut text, value);
        self.out.push_str(match text.as_str() {
            "nan" => "NaN",
            "inf" => "Infinity",
            "-inf" => "-Infinity",
            finite => finite,
        });
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{C}' => self.out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ensure_ascii && !matches!(c, ' '..='~' | '\u{7F}')) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }

    fn list(&mut self, list: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut any = false;
        for item in list.try_iter()?.checked() {
            self.separate(any, depth + 1);
            any = true;
            self.value(&item?, depth + 1)?;
        }
        self.close(']', any, depth);
        Ok(())
    }

    fn map(&mut self, map: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = map.try_iter()?.checked().collect::<Result<_, _>>()?;
        if self.sort_keys {
            keys.sort();
        }
        self.out.push('{');
        let any = !keys.is_empty();
        for (i, key) in keys.iter().enumerate() {
            self.separate(i > 0, depth + 1);
            self.map_key(key)?;
            self.out.push_str(&self.key.clone());
            self.value(&map.get_item(key)?, depth + 1)?;
        }
        self.close('}', any, depth);
        Ok(())
    }

    /// Keys are strings; `json.dumps` turns other simple keys into strings.
    fn map_key(&mut self, key: &Value) -> Result<(), Error> {
        if let Some(text) = key.as_str() {
            self.string(text);
            return Ok(());
        }
        if !matches!(key.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number) {
            return Err(Error::new(ErrorKind::BadSerialization, "tojson needs simple keys"));
        }
        self.out.push('"');
        self.value(key, 0)?;
        self.out.push('"');
        Ok(())
    }

    fn separate(&mut self, not_first: bool, depth: usize) {
        if not_first {
            self.out.push_str(&self.item);
        }
        self.new_line(depth);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn close(&mut self, bracket: char, any: bool, depth: usize) {
        if any {
            self.new_line(depth);
        }
        self.out.push(bracket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(value: Value) -> String {
        let mut env = minijinja::Environment::new();
        env.set_formatter(format);
        env.render_str("{{ x }}", minijinja::context! { x => value }).unwrap()
    }

    /// References: what Python 3.11 prints for the same values.
    #[test]
    fn values_print_as_in_python() {
        for (x, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (1e15, "1000000000000000.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e100, "1e+100"),
            (-0.0, "-0.0"),
        ] {
            assert_eq!(printed(Value::from(x)), text);
        }
        let value: serde_json::Value =
            serde_json::json!({"a": [true, null, "it's", "q\"'\n"], "b": {"c": 2}});
        assert_eq!(
            printed(Value::from(minijinja::value::Serde(value))),
            r#"{'a': [True, None, "it's", 'q"\'\n'], 'b': {'c': 2}}"#
        );
    }
}
