//! Element types, symbolic dimensions and shapes of values.

use std::fmt;

/// Element type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum DType {
    F32,
    F16,
    BF16,
    I32,
    /// Quantised activations: rows of `k` numbers as `[k x i8][k/32 x f32 scale][k/16 x i16 sums]`,
    /// `k` a multiple of [`DType::Q8_BLOCK`].
    Q8,
}

impl DType {
    /// Numbers that share a scale in [`DType::Q8`].
    pub const Q8_BLOCK: usize = 32;

    /// Bytes of a row of `k` elements.
    pub const fn row_bytes(self, k: usize) -> usize {
        match self {
            DType::F32 | DType::I32 => 4 * k,
            DType::F16 | DType::BF16 => 2 * k,
            DType::Q8 => k + k / 8 * 3,
        }
    }

    /// Lower-case name for messages and exports.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
            DType::Q8 => "q8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A leading dimension: a constant or a symbol that each step binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    /// Known when the graph is built.
    Const(usize),
    /// Token rows in the step.
    Rows,
    /// Rows whose logits are wanted.
    Outs,
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Const(n) => write!(f, "{n}"),
            Dim::Rows => f.write_str("rows"),
            Dim::Outs => f.write_str("outs"),
        }
    }
}

/// Values of the symbols, for one step or as the upper bound of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)]
pub struct Bind {
    pub rows: usize,
    pub outs: usize,
}

impl Bind {
    /// The length of `dim` under this binding.
    pub const fn len(&self, dim: Dim) -> usize {
        match dim {
            Dim::Const(n) => n,
            Dim::Rows => self.rows,
            Dim::Outs => self.outs,
        }
    }
}

/// Only the leading dimension can be symbolic; the inner ones are constants, outermost first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub struct Shape {
    pub lead: Dim,
    pub inner: Vec<usize>,
}

impl Shape {
    /// `[lead, inner...]`.
    pub fn new(lead: Dim, inner: impl Into<Vec<usize>>) -> Shape {
        Shape { lead, inner: inner.into() }
    }

    /// Elements per index of the leading dimension.
    pub fn width(&self) -> usize {
        self.inner.iter().product()
    }

    /// The innermost dimension (1 for a vector of scalars).
    pub fn last(&self) -> usize {
        self.inner.last().copied().unwrap_or(1)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}", self.lead)?;
        for d in &self.inner {
            write!(f, ", {d}")?;
        }
        f.write_str("]")
    }
}

/// Element type and shape of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub struct ValueType {
    pub dtype: DType,
    pub shape: Shape,
}

impl ValueType {
    /// An f32 value of shape `[lead, inner...]`.
    pub fn f32(lead: Dim, inner: impl Into<Vec<usize>>) -> ValueType {
        ValueType { dtype: DType::F32, shape: Shape::new(lead, inner) }
    }

    /// An i32 value of shape `[lead, inner...]`.
    pub fn i32(lead: Dim, inner: impl Into<Vec<usize>>) -> ValueType {
        ValueType { dtype: DType::I32, shape: Shape::new(lead, inner) }
    }

    /// Bytes per index of the leading dimension.
    pub fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.shape.width())
    }

    /// Bytes of the whole value under a binding.
    pub fn bytes(&self, bind: &Bind) -> usize {
        self.row_bytes() * bind.len(self.shape.lead)
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}
