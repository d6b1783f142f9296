//! The 13 types of metadata values, and arrays of each.

/// A metadata value as it stands in the file.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// A typed array; `Nested` is an array of arrays.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Nested(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// The number of a value type in files; it is the position of the type in [`Value`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

const TYPES: [(ValueType, &str); 13] = [
    (ValueType::U8, "u8"),
    (ValueType::I8, "i8"),
    (ValueType::U16, "u16"),
    (ValueType::I16, "i16"),
    (ValueType::U32, "u32"),
    (ValueType::I32, "i32"),
    (ValueType::F32, "f32"),
    (ValueType::Bool, "bool"),
    (ValueType::String, "string"),
    (ValueType::Array, "array"),
    (ValueType::U64, "u64"),
    (ValueType::I64, "i64"),
    (ValueType::F64, "f64"),
];

impl ValueType {
    pub(super) fn from_number(number: u32) -> Option<ValueType> {
        TYPES.get(number as usize).map(|&(ty, _)| ty)
    }

    pub(super) fn name(self) -> &'static str {
        TYPES[self as usize].1
    }
}

impl Value {
    pub(super) fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// The type and, for numbers, the value, for messages: `i32 -3`, `string`, `array of 4 f32`.
    pub fn describe(&self) -> String {
        let name = self.value_type().name();
        match self {
            Value::Array(array) => format!("array of {} {}", array.len(), array.item_type().name()),
            Value::String(_) => name.to_owned(),
            Value::Bool(b) => format!("{name} {b}"),
            Value::F32(_) | Value::F64(_) => format!("{name} {}", self.as_f64().unwrap_or_default()),
            _ => format!("{name} {}", self.as_i128().unwrap_or_default()),
        }
    }

    /// Any of the eight integer types.
    pub fn as_i128(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(x) => x.into(),
            Value::I8(x) => x.into(),
            Value::U16(x) => x.into(),
            Value::I16(x) => x.into(),
            Value::U32(x) => x.into(),
            Value::I32(x) => x.into(),
            Value::U64(x) => x.into(),
            Value::I64(x) => x.into(),
            _ => return None,
        })
    }

    /// Either float type.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::F32(x) => Some(x.into()),
            Value::F64(x) => Some(x),
            _ => None,
        }
    }

    /// A string.
    pub fn as_str(&self) -> Option<&str> {
        if let Value::String(s) = self { Some(s) } else { None }
    }

    /// A boolean.
    pub fn as_bool(&self) -> Option<bool> {
        if let Value::Bool(b) = self { Some(*b) } else { None }
    }

    /// An array.
    pub fn as_array(&self) -> Option<&Array> {
        if let Value::Array(a) = self { Some(a) } else { None }
    }
}

/// Runs the same expression on whichever vector the array holds.
macro_rules! each {
    ($array:expr, $v:ident => $body:expr) => {
        match $array {
            Array::U8($v) => $body,
            Array::I8($v) => $body,
            Array::U16($v) => $body,
            Array::I16($v) => $body,
            Array::U32($v) => $body,
            Array::I32($v) => $body,
            Array::F32($v) => $body,
            Array::Bool($v) => $body,
            Array::String($v) => $body,
            Array::Nested($v) => $body,
            Array::U64($v) => $body,
            Array::I64($v) => $body,
            Array::F64($v) => $body,
        }
    };
}

impl Array {
    /// Number of items.
    pub fn len(&self) -> usize {
        each!(self, v => v.len())
    }

    /// Whether there are no items.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn item_type(&self) -> ValueType {
        match self {
            Array::U8(_) => ValueType::U8,
            Array::I8(_) => ValueType::I8,
            Array::U16(_) => ValueType::U16,
            Array::I16(_) => ValueType::I16,
            Array::U32(_) => ValueType::U32,
            Array::I32(_) => ValueType::I32,
            Array::F32(_) => ValueType::F32,
            Array::Bool(_) => ValueType::Bool,
            Array::String(_) => ValueType::String,
            Array::Nested(_) => ValueType::Array,
            Array::U64(_) => ValueType::U64,
            Array::I64(_) => ValueType::I64,
            Array::F64(_) => ValueType::F64,
        }
    }

    /// The items as `i32`, from an array of any integer type whose items all fit.
    pub fn to_i32s(&self) -> Option<Vec<i32>> {
        fn convert<T: Copy + TryInto<i32>>(items: &[T]) -> Option<Vec<i32>> {
            items.iter().map(|&x| x.try_into().ok()).collect()
        }
        match self {
            Array::U8(v) => convert(v),
            Array::I8(v) => convert(v),
            Array::U16(v) => convert(v),
            Array::I16(v) => convert(v),
            Array::U32(v) => convert(v),
            Array::I32(v) => Some(v.clone()),
            Array::U64(v) => convert(v),
            Array::I64(v) => convert(v),
            _ => None,
        }
    }
}
