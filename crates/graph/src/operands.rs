//! Which operands each operation accepts, and what comes out: one method per signature.

mod compressed;
mod paged;

use crate::graph::WeightDecl;
use crate::op::Op;
use crate::payload::{Clamp, Conv1d, DeltaRule, HyperMix, Norm, Rope, Router, Slice, Streams};
use crate::state::{StateDecl, StateKind};
use crate::types::{DType, Dim, Shape, ValueType};

pub(crate) fn quantized(x: &ValueType) -> Result<ValueType, String> {
    let k = x.shape.last();
    if !k.is_multiple_of(DType::Q8_BLOCK) {
        return Err(format!("rows of {x} are not a multiple of {} numbers", DType::Q8_BLOCK));
    }
    Ok(ValueType { dtype: DType::Q8, shape: x.shape.clone() })
}

/// The operands of one node under inspection.
pub(crate) struct Operands<'a> {
    pub(crate) inputs: &'a [&'a ValueType],
    pub(crate) weight: Option<&'a WeightDecl>,
    pub(crate) state: Option<&'a StateDecl>,
}

impl Operands<'_> {
    pub(crate) fn counts(&self, op: &Op) -> Result<(), String> {
        let (inputs, weight, state) = op.arity();
        if let Some(inputs) = inputs.filter(|n| *n != self.inputs.len()) {
            return Err(format!("takes {inputs} inputs, got {}", self.inputs.len()));
        }
        for (what, wanted, got) in
            [("weight", weight, self.weight.is_some()), ("state", state, self.state.is_some())]
        {
            if wanted != got {
                return Err(format!("{} a {what}", if wanted { "needs" } else { "does not take" }));
            }
        }
        Ok(())
    }

    pub(crate) fn float(&self, i: usize) -> Result<&ValueType, String> {
        let x = self.inputs[i];
        if x.dtype != DType::F32 { Err(format!("input {i} is {x}, not f32")) } else { Ok(x) }
    }

    /// Input `i` as a vector of i32; returns its leading dimension.
    pub(crate) fn indices(&self, i: usize) -> Result<Dim, String> {
        let x = self.inputs[i];
        if x.dtype != DType::I32 || x.shape.width() != 1 {
            return Err(format!("input {i} is {x}, not a vector of i32"));
        }
        Ok(x.shape.lead)
    }

    pub(crate) fn equal_floats(&self) -> Result<&ValueType, String> {
        let (a, b) = (self.float(0)?, self.float(1)?);
        if a != b { Err(format!("inputs differ: {a} and {b}")) } else { Ok(a) }
    }

    fn same_lead(&self, dims: &[Dim]) -> Result<(), String> {
        if dims.windows(2).all(|w| w[0] == w[1]) {
            return Ok(());
        }
        Err(format!("leading dimensions differ: {}", self.list()))
    }

    fn list(&self) -> String {
        self.inputs.iter().map(|t| t.to_string()).collect::<Vec<_>>().join(", ")
    }

    fn weight(&self) -> Result<&WeightDecl, String> {
        self.weight.ok_or_else(|| "needs a weight".to_string())
    }

    pub(crate) fn weight_is(&self, shape: &[usize]) -> Result<&WeightDecl, String> {
        let w = self.weight()?;
        if w.shape != shape {
            return Err(format!("weight '{}' has shape {:?}, expected {shape:?}", w.name, w.shape));
        }
        Ok(w)
    }

    pub(crate) fn embed(&self) -> Result<Vec<ValueType>, String> {
        let (ids, w) = (self.inputs[0], self.weight()?);
        if ids.dtype != DType::I32 || ids.shape.inner.len() > 1 {
            return Err(format!("input 0 is {ids}, not i32 ids, one or several per row"));
        }
        match w.shape[..] {
            [_, k] => Ok(vec![ValueType::f32(ids.shape.lead, [k * ids.shape.width()])]),
            _ => Err(format!("weight '{}' has shape {:?}, expected [vocab, hidden]", w.name, w.shape)),
        }
    }

    pub(crate) fn norm(&self, i: usize, n: &Norm) -> Result<ValueType, String> {
        let x = self.float(i)?;
        if self.weight()?.shape != [x.shape.width()] {
            self.weight_is(&[n.group])?;
        }
        grouped(x, n).cloned()
    }

    pub(crate) fn unit_norm(&self, n: &Norm) -> Result<Vec<ValueType>, String> {
        Ok(vec![grouped(self.float(0)?, n)?.clone()])
    }

    pub(crate) fn layer_norm(&self, n: &Norm) -> Result<Vec<ValueType>, String> {
        self.weight_is(&[2 * n.group])?;
        self.unit_norm(n)
    }

    /// The activation type that a weight wants.
    fn activation(&self, i: usize, w: &WeightDecl) -> Result<&ValueType, String> {
        let (x, want) = (self.inputs[i], w.activation());
        if x.dtype != want {
            return Err(format!("weight '{}' ({}) takes {want} activations, got {x}", w.name, w.ty));
        }
        Ok(x)
    }

    pub(crate) fn matmul(&self) -> Result<Vec<ValueType>, String> {
        let w = self.weight()?;
        let x = self.activation(0, w)?;
        match (&w.shape[..], &x.shape.inner[..]) {
            (&[n, k], &[xk]) if k == xk => Ok(vec![ValueType::f32(x.shape.lead, [n])]),
            (&[n, k], &[m, xk]) if k == xk => Ok(vec![ValueType::f32(x.shape.lead, [m, n])]),
            _ => Err(format!("{x} times weight '{}' of shape {:?} ([n, k])", w.name, w.shape)),
        }
    }

    pub(crate) fn grouped_matmul(&self) -> Result<Vec<ValueType>, String> {
        let w = self.weight()?;
        let (x, ids) = (self.activation(0, w)?, self.inputs[1]);
        let fits = |n: usize, top_k: usize| Ok(vec![ValueType::f32(x.shape.lead, [top_k, n])]);
        if ids.dtype == DType::I32 && ids.shape.lead == x.shape.lead {
            match (&w.shape[..], &x.shape.inner[..], &ids.shape.inner[..]) {
                (&[_, n, k], &[xk], &[top_k]) if k == xk => return fits(n, top_k),
                (&[_, n, k], &[slots, xk], &[top_k]) if k == xk && slots == top_k => return fits(n, top_k),
                _ => {}
            }
        }
        Err(format!(
            "{x} with experts {ids} times weight '{}' of shape {:?} ([experts, n, k])",
            w.name, w.shape
        ))
    }

    pub(crate) fn head_matmul(&self) -> Result<Vec<ValueType>, String> {
        let w = self.weight()?;
        let x = self.activation(0, w)?;
        match (&w.shape[..], &x.shape.inner[..]) {
            (&[heads, n, k], &[xh, xk]) if heads == xh && k == xk => {
                Ok(vec![ValueType::f32(x.shape.lead, [heads * n])])
            }
            _ => Err(format!("{x} times weight '{}' of shape {:?} ([heads, n, k])", w.name, w.shape)),
        }
    }

    pub(crate) fn rope(&self, r: &Rope) -> Result<Vec<ValueType>, String> {
        let (x, table) = (self.float(0)?, self.float(1)?);
        self.same_lead(&[x.shape.lead, table.shape.lead])?;
        let dims = table.shape.width();
        if r.head_dim == 0 || !x.shape.width().is_multiple_of(r.head_dim) || dims > r.head_dim {
            return Err(format!("{x} as heads of {}, with a table of {dims} rotated dimensions", r.head_dim));
        }
        Ok(vec![x.clone()])
    }

    fn recurrent(&self, expected: usize) -> Result<(), String> {
        match self.state.map(|s| &s.kind) {
            Some(StateKind::Recurrent { width }) if *width == expected => Ok(()),
            _ => Err(format!("needs recurrent state of {expected} numbers")),
        }
    }

    pub(crate) fn router(&self, r: &Router) -> Result<Vec<ValueType>, String> {
        let x = self.float(0)?;
        if r.top_k == 0 || r.top_k > x.shape.width() {
            return Err(format!("cannot choose {} experts from {x}", r.top_k));
        }
        if r.biased {
            self.weight_is(&[x.shape.width()])?;
        }
        let lead = x.shape.lead;
        Ok(vec![ValueType::i32(lead, [r.top_k]), ValueType::f32(lead, [r.top_k])])
    }

    pub(crate) fn expert_scale(&self) -> Result<Vec<ValueType>, String> {
        let (y, ids, w) = (self.float(0)?, self.inputs[1], self.weight()?);
        self.same_lead(&[y.shape.lead, ids.shape.lead])?;
        let fits = ids.dtype == DType::I32
            && w.shape.len() == 1
            && matches!((&y.shape.inner[..], &ids.shape.inner[..]), (&[a, _], &[b]) if a == b);
        if fits {
            Ok(vec![y.clone()])
        } else {
            Err(format!("{y} with experts {ids} and scales {:?}", w.shape))
        }
    }

    pub(crate) fn combine(&self) -> Result<Vec<ValueType>, String> {
        let (y, w) = (self.float(0)?, self.float(1)?);
        self.same_lead(&[y.shape.lead, w.shape.lead])?;
        match (&y.shape.inner[..], &w.shape.inner[..]) {
            (&[slots, n], &[top_k]) if slots == top_k => {
                Ok(vec![ValueType { dtype: DType::F32, shape: Shape::new(y.shape.lead, [n]) }])
            }
            _ => Err(format!("cannot combine {y} with weights {w}")),
        }
    }

    /// `state_from` and `state_to`, from input `first` on.
    fn state_slots(&self, lead: Dim, first: usize) -> Result<(), String> {
        self.same_lead(&[lead, self.indices(first)?, self.indices(first + 1)?])
    }

    pub(crate) fn conv1d(&self, c: &Conv1d) -> Result<Vec<ValueType>, String> {
        let x = self.float(0)?;
        let channels = x.shape.width();
        self.state_slots(x.shape.lead, 1)?;
        self.weight_is(&[channels, c.kernel])?;
        if c.kernel == 0 || c.dilation == 0 {
            return Err(format!("kernel {} with dilation {}", c.kernel, c.dilation));
        }
        self.recurrent(c.tail() * channels)?;
        Ok(vec![x.clone()])
    }

    pub(crate) fn delta_rule(&self, d: &DeltaRule) -> Result<Vec<ValueType>, String> {
        let (x, g, beta) = (self.float(0)?, self.float(1)?, self.float(2)?);
        self.state_slots(x.shape.lead, 3)?;
        self.same_lead(&[x.shape.lead, g.shape.lead, beta.shape.lead])?;
        let grouped = d.k_heads > 0 && d.v_heads.is_multiple_of(d.k_heads);
        let widths = (x.shape.width(), g.shape.width(), beta.shape.width());
        if !grouped || widths != (d.input_width(), d.decays(), d.v_heads) {
            return Err(format!("{} for {d:?}", self.list()));
        }
        self.recurrent(d.v_heads * d.k_dim * d.v_dim)?;
        Ok(vec![ValueType::f32(x.shape.lead, [d.v_heads * d.v_dim])])
    }

    pub(crate) fn clamp(&self, c: &Clamp) -> Result<Vec<ValueType>, String> {
        if c.low <= c.high {
            return Ok(vec![self.float(0)?.clone()]);
        }
        Err(format!("no number is between {} and {}", c.low, c.high))
    }

    pub(crate) fn scale_vec(&self) -> Result<Vec<ValueType>, String> {
        let (x, w) = (self.float(0)?, self.weight()?);
        match w.shape[..] {
            [m] if m > 0 && x.shape.width().is_multiple_of(m) => Ok(vec![x.clone()]),
            _ => Err(format!("weight '{}' of shape {:?} does not divide {x}", w.name, w.shape)),
        }
    }

    pub(crate) fn slice(&self, s: &Slice) -> Result<Vec<ValueType>, String> {
        let x = self.float(0)?;
        let width = x.shape.last();
        if s.group == 0 || !width.is_multiple_of(s.group) || s.len == 0 || s.from + s.len > s.group {
            return Err(format!("{} numbers from {} of each {} of {x}", s.len, s.from, s.group));
        }
        let outer = x.shape.inner.split_last().map_or(&[][..], |(_, outer)| outer);
        Ok(vec![ValueType::f32(x.shape.lead, [outer, &[width / s.group * s.len]].concat())])
    }

    /// `[L, n * width]` for each listed input as streams, the width of one.
    fn streams(&self, s: &Streams, inputs: &[usize]) -> Result<(Dim, usize), String> {
        let first = self.float(inputs[0])?;
        for &i in inputs {
            let x = self.float(i)?;
            self.same_lead(&[first.shape.lead, x.shape.lead])?;
            if s.n == 0 || !x.shape.width().is_multiple_of(s.n) || x.shape.width() != first.shape.width() {
                return Err(format!("{} as {} streams", self.list(), s.n));
            }
        }
        Ok((first.shape.lead, first.shape.width() / s.n))
    }

    pub(crate) fn reshape(&self, inner: &[usize]) -> Result<Vec<ValueType>, String> {
        let x = self.float(0)?;
        let out = ValueType::f32(x.shape.lead, inner);
        if out.shape.width() != x.shape.width() {
            return Err(format!("{x} does not have the numbers of {out}"));
        }
        Ok(vec![out])
    }

    pub(crate) fn concat(&self) -> Result<Vec<ValueType>, String> {
        let Some(first) = self.inputs.first() else {
            return Err("takes at least 1 input, got 0".to_string());
        };
        let mut width = 0;
        for i in 0..self.inputs.len() {
            let x = self.float(i)?;
            self.same_lead(&[first.shape.lead, x.shape.lead])?;
            width += x.shape.width();
        }
        Ok(vec![ValueType::f32(first.shape.lead, [width])])
    }

    pub(crate) fn repeat(&self, s: &Streams) -> Result<Vec<ValueType>, String> {
        let x = self.float(0)?;
        Ok(vec![ValueType::f32(x.shape.lead, [s.n * x.shape.width()])])
    }

    pub(crate) fn stream_sum(&self, s: &Streams) -> Result<Vec<ValueType>, String> {
        let (lead, width) = self.streams(s, &[0])?;
        Ok(vec![ValueType::f32(lead, [width])])
    }

    pub(crate) fn stream_dot(&self, s: &Streams) -> Result<Vec<ValueType>, String> {
        let (lead, _) = self.streams(s, &[0, 1])?;
        Ok(vec![ValueType::f32(lead, [s.n])])
    }

    /// `y f32[L, width]` and `weights f32[L, n]` at inputs `first` and `first + 1`.
    fn outer(&self, s: &Streams, first: usize) -> Result<(Dim, usize), String> {
        let (y, w) = (self.float(first)?, self.float(first + 1)?);
        self.same_lead(&[y.shape.lead, w.shape.lead])?;
        if w.shape.width() != s.n {
            return Err(format!("{w} as one weight for each of {} streams", s.n));
        }
        Ok((y.shape.lead, y.shape.width()))
    }

    pub(crate) fn stream_mul(&self, s: &Streams) -> Result<Vec<ValueType>, String> {
        let (lead, width) = self.outer(s, 0)?;
        Ok(vec![ValueType::f32(lead, [s.n * width])])
    }

    pub(crate) fn stream_add(&self, s: &Streams) -> Result<Vec<ValueType>, String> {
        let (lead, width) = self.outer(s, 1)?;
        let h = self.float(0)?;
        self.same_lead(&[h.shape.lead, lead])?;
        if h.shape.width() != s.n * width {
            return Err(format!("{} as {} streams", self.list(), s.n));
        }
        Ok(vec![h.clone()])
    }

    pub(crate) fn stream_weighted_sum(&self, s: &Streams) -> Result<Vec<ValueType>, String> {
        let (lead, width) = self.streams(s, &[0])?;
        self.is_float(1, lead, s.n)?;
        Ok(vec![ValueType::f32(lead, [width])])
    }

    pub(crate) fn stream_mix(&self, s: &Streams) -> Result<Vec<ValueType>, String> {
        let (lead, width) = self.streams(s, &[0])?;
        for (i, width) in [(1, width), (2, s.n), (3, s.n * s.n)] {
            self.is_float(i, lead, width)?;
        }
        Ok(vec![self.float(0)?.clone()])
    }

    pub(crate) fn hyper_mix(&self, h: &HyperMix) -> Result<Vec<ValueType>, String> {
        let lead = self.float(0)?.shape.lead;
        if h.n == 0 || h.iterations == 0 {
            return Err(format!("{} streams in {} iterations", h.n, h.iterations));
        }
        self.is_float(0, lead, h.width())?;
        self.weight_is(&[h.width() + 3])?;
        Ok([h.n, h.n, h.n * h.n].map(|width| ValueType::f32(lead, [width])).to_vec())
    }

    fn is_float(&self, i: usize, lead: Dim, width: usize) -> Result<(), String> {
        let x = self.float(i)?;
        if x.shape.lead != lead || x.shape.width() != width {
            return Err(format!("input {i} is {x}, expected {width} numbers in each row of {}", self.list()));
        }
        Ok(())
    }
}

fn grouped<'a>(x: &'a ValueType, n: &Norm) -> Result<&'a ValueType, String> {
    if n.group == 0 || !x.shape.width().is_multiple_of(n.group) {
        return Err(format!("{x} does not split into groups of {}", n.group));
    }
    Ok(x)
}
