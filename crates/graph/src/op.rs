//! Operations, their payloads, and the one place that knows which operands each accepts.

use std::sync::Arc;

use crate::graph::WeightDecl;
use crate::state::{StateDecl, StateKind};
use crate::types::{DType, Dim, Shape, ValueType};

/// Root-mean-square normalisation of groups of `group` numbers: `x / sqrt(mean(x^2) + eps) * weight`
/// (Zhang & Sennrich 2019). A group of the whole row is the layer norm of LLaMA; a group of one head is
/// the q/k norm of Qwen3.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Norm {
    pub eps: f32,
    pub group: usize,
}

/// Frequencies of rotary position embedding (Su et al. 2021). Scalings (linear, llama3, YaRN) are
/// already applied: a model computes them once, so that devices know one form only.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Radians per position for each rotated pair.
    pub inv_freq: Arc<[f32]>,
    /// Factor on cosine and sine (YaRN's attention factor; 1 otherwise).
    pub attention_factor: f32,
}

/// Which two elements form a rotated pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// `(i, i + dims/2)`, as Hugging Face stores q and k.
    HalfSplit,
    /// `(2i, 2i + 1)`, as GGUF files of the llama architecture store them.
    Interleaved,
}

/// Rotation of each head's first `dims` elements, where the table holds `dims` numbers per row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Rope {
    pub style: RopeStyle,
    pub head_dim: usize,
}

/// Causal grouped-query attention over a sequence's pages.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Attend {
    pub heads: usize,
    pub kv_heads: usize,
    /// Factor on the scores, usually `1/sqrt(head_dim)`.
    pub scale: f32,
}

/// How expert scores are computed from router logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
}

/// Choice of `top_k` experts per row: higher score first, then lower index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Router {
    pub scoring: Scoring,
    pub top_k: usize,
    /// Whether the chosen scores are divided by their sum.
    pub renormalise: bool,
}

/// An operation with its full payload. The comment gives `inputs; weight; state -> outputs`, with `L` for
/// any leading dimension.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `ids i32[L]; [vocab, k] -> f32[L, k]`: rows of a table.
    Embed,
    /// `x f32[L, w]; [group] -> f32[L, w]`.
    RmsNorm(Norm),
    /// `x f32[L, .., k] -> q8[L, .., k]`: blocks of 32 with their own scale.
    Quantize,
    /// `x f32|q8 [L, k]; [n, k] -> f32[L, n]`: q8 for quantised weights, f32 for the others.
    MatMul,
    /// `x [L, k] or [L, top_k, k], ids i32[L, top_k]; [experts, n, k] -> f32[L, top_k, n]`.
    GroupedMatMul,
    /// `x f32[L, n]; [n] -> f32[L, n]`.
    BiasAdd,
    /// `x f32[L, n]; [1] -> f32[L, n]`: the scale of a whole weight tensor, applied to its product.
    Scale,
    /// `y f32[L, top_k, n], ids i32[L, top_k]; [experts] -> f32[L, top_k, n]`: the scale of each expert.
    ExpertScale,
    /// `a, b -> a + b`, equal f32 types.
    Add,
    /// `a, b -> a * b`, equal f32 types.
    Mul,
    /// `x -> x / (1 + exp(-x))`.
    Silu,
    /// `positions i32[L] -> f32[L, 2 * pairs]`: cosines, then sines. Once per step for all layers.
    RopeTable(RopeTable),
    /// `x f32[L, heads * head_dim], table f32[L, dims] -> f32[L, heads * head_dim]`.
    Rope(Rope),
    /// `k f32[L, kw], v f32[L, vw], slots i32[L]; state -> ()`: writes each row at its slot
    /// (`page * PAGE + offset`); a negative slot is skipped.
    StoreKv,
    /// `q f32[L, heads * kd], positions i32[L], table_at i32[L], pages i32[cap]; state -> f32[L, heads * vd]`.
    /// Row `r` attends to positions `0..=positions[r]` of the page list that starts at `table_at[r]`.
    Attend(Attend),
    /// `logits f32[L, experts] -> ids i32[L, top_k], weights f32[L, top_k]`, in rank order.
    Router(Router),
    /// `y f32[L, top_k, n], weights f32[L, top_k] -> f32[L, n]`: summed in rank order.
    CombineExperts,
    /// `x f32[L, n], index i32[outs] -> f32[outs, n]`.
    GatherRows,
    /// `x f32[L, n] -> i32[L]`: index of the largest, lowest index among equals.
    ArgMax,
    /// Fused `Mul(Silu(gate), up)`.
    SwiGlu,
    /// Fused `Quantize(RmsNorm(x))`.
    RmsNormQuantize(Norm),
    /// Fused `Quantize(SwiGlu(gate, up))`.
    SwiGluQuantize,
    /// Fused `s = Add(a, b); RmsNorm(s)`: outputs `s` and the norm.
    AddRmsNorm(Norm),
}

impl Op {
    /// Snake-case name for messages and exports.
    pub const fn name(&self) -> &'static str {
        match self {
            Op::Embed => "embed",
            Op::RmsNorm(_) => "rms_norm",
            Op::Quantize => "quantize",
            Op::MatMul => "matmul",
            Op::GroupedMatMul => "grouped_matmul",
            Op::BiasAdd => "bias_add",
            Op::Scale => "scale",
            Op::ExpertScale => "expert_scale",
            Op::Add => "add",
            Op::Mul => "mul",
            Op::Silu => "silu",
            Op::RopeTable(_) => "rope_table",
            Op::Rope(_) => "rope",
            Op::StoreKv => "store_kv",
            Op::Attend(_) => "attend",
            Op::Router(_) => "router",
            Op::CombineExperts => "combine_experts",
            Op::GatherRows => "gather_rows",
            Op::ArgMax => "argmax",
            Op::SwiGlu => "swiglu",
            Op::RmsNormQuantize(_) => "rms_norm_quantize",
            Op::SwiGluQuantize => "swiglu_quantize",
            Op::AddRmsNorm(_) => "add_rms_norm",
        }
    }

    /// Whether this op exists only as the result of a fusion.
    pub const fn is_fused(&self) -> bool {
        matches!(self, Op::SwiGlu | Op::RmsNormQuantize(_) | Op::SwiGluQuantize | Op::AddRmsNorm(_))
    }

    /// The output types for these operands, or why they do not fit.
    pub fn infer(
        &self,
        inputs: &[&ValueType],
        weight: Option<&WeightDecl>,
        state: Option<&StateDecl>,
    ) -> Result<Vec<ValueType>, String> {
        let sig = Operands { inputs, weight, state };
        sig.counts(self)?;
        match self {
            Op::Embed => sig.embed(),
            Op::RmsNorm(n) => sig.norm(0, n).map(|t| vec![t]),
            Op::Quantize => Ok(vec![quantized(sig.float(0)?)?]),
            Op::MatMul => sig.matmul(),
            Op::GroupedMatMul => sig.grouped_matmul(),
            Op::BiasAdd => {
                let x = sig.float(0)?;
                sig.weight_is(&[x.shape.width()])?;
                Ok(vec![x.clone()])
            }
            Op::Scale => {
                sig.weight_is(&[1])?;
                Ok(vec![sig.float(0)?.clone()])
            }
            Op::ExpertScale => sig.expert_scale(),
            Op::Add | Op::Mul | Op::SwiGlu => Ok(vec![sig.equal_floats()?.clone()]),
            Op::Silu => Ok(vec![sig.float(0)?.clone()]),
            Op::RopeTable(t) => {
                let lead = sig.indices(0)?;
                Ok(vec![ValueType::f32(lead, [2 * t.inv_freq.len()])])
            }
            Op::Rope(r) => sig.rope(r),
            Op::StoreKv => sig.store_kv(),
            Op::Attend(a) => sig.attend(a),
            Op::Router(r) => sig.router(r),
            Op::CombineExperts => sig.combine(),
            Op::GatherRows => {
                let (x, lead) = (sig.float(0)?, sig.indices(1)?);
                Ok(vec![ValueType::f32(lead, x.shape.inner.clone())])
            }
            Op::ArgMax => Ok(vec![ValueType::i32(sig.float(0)?.shape.lead, [])]),
            Op::RmsNormQuantize(n) => Ok(vec![quantized(&sig.norm(0, n)?)?]),
            Op::SwiGluQuantize => Ok(vec![quantized(sig.equal_floats()?)?]),
            Op::AddRmsNorm(n) => {
                let sum = sig.equal_floats()?.clone();
                Ok(vec![sum, sig.norm(0, n)?])
            }
        }
    }

    /// How many inputs, and whether a weight and a state are named.
    const fn arity(&self) -> (usize, bool, bool) {
        match self {
            Op::Embed | Op::RmsNorm(_) | Op::MatMul | Op::BiasAdd | Op::Scale | Op::RmsNormQuantize(_) => {
                (1, true, false)
            }
            Op::GroupedMatMul | Op::ExpertScale | Op::AddRmsNorm(_) => (2, true, false),
            Op::Quantize | Op::Silu | Op::RopeTable(_) | Op::Router(_) | Op::ArgMax => (1, false, false),
            Op::Add
            | Op::Mul
            | Op::Rope(_)
            | Op::CombineExperts
            | Op::GatherRows
            | Op::SwiGlu
            | Op::SwiGluQuantize => (2, false, false),
            Op::StoreKv => (3, false, true),
            Op::Attend(_) => (4, false, true),
        }
    }
}

fn quantized(x: &ValueType) -> Result<ValueType, String> {
    let k = x.shape.last();
    if !k.is_multiple_of(DType::Q8_BLOCK) {
        return Err(format!("rows of {x} are not a multiple of {} numbers", DType::Q8_BLOCK));
    }
    Ok(ValueType { dtype: DType::Q8, shape: x.shape.clone() })
}

/// The operands of one node under inspection.
struct Operands<'a> {
    inputs: &'a [&'a ValueType],
    weight: Option<&'a WeightDecl>,
    state: Option<&'a StateDecl>,
}

impl Operands<'_> {
    fn counts(&self, op: &Op) -> Result<(), String> {
        let (inputs, weight, state) = op.arity();
        if self.inputs.len() != inputs {
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

    fn float(&self, i: usize) -> Result<&ValueType, String> {
        let x = self.inputs[i];
        if x.dtype != DType::F32 { Err(format!("input {i} is {x}, not f32")) } else { Ok(x) }
    }

    /// Input `i` as a vector of i32; returns its leading dimension.
    fn indices(&self, i: usize) -> Result<Dim, String> {
        let x = self.inputs[i];
        if x.dtype != DType::I32 || x.shape.width() != 1 {
            return Err(format!("input {i} is {x}, not a vector of i32"));
        }
        Ok(x.shape.lead)
    }

    fn equal_floats(&self) -> Result<&ValueType, String> {
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

    fn weight_is(&self, shape: &[usize]) -> Result<&WeightDecl, String> {
        let w = self.weight()?;
        if w.shape != shape {
            return Err(format!("weight '{}' has shape {:?}, expected {shape:?}", w.name, w.shape));
        }
        Ok(w)
    }

    fn embed(&self) -> Result<Vec<ValueType>, String> {
        let (lead, w) = (self.indices(0)?, self.weight()?);
        match w.shape[..] {
            [_, k] => Ok(vec![ValueType::f32(lead, [k])]),
            _ => Err(format!("weight '{}' has shape {:?}, expected [vocab, hidden]", w.name, w.shape)),
        }
    }

    fn norm(&self, i: usize, n: &Norm) -> Result<ValueType, String> {
        let x = self.float(i)?;
        self.weight_is(&[n.group])?;
        if n.group == 0 || !x.shape.width().is_multiple_of(n.group) {
            return Err(format!("{x} does not split into groups of {}", n.group));
        }
        Ok(x.clone())
    }

    /// The activation type that a weight wants.
    fn activation(&self, i: usize, w: &WeightDecl) -> Result<&ValueType, String> {
        let (x, want) = (self.inputs[i], w.activation());
        if x.dtype != want {
            return Err(format!("weight '{}' ({}) takes {want} activations, got {x}", w.name, w.ty));
        }
        Ok(x)
    }

    fn matmul(&self) -> Result<Vec<ValueType>, String> {
        let w = self.weight()?;
        let x = self.activation(0, w)?;
        match (&w.shape[..], &x.shape.inner[..]) {
            (&[n, k], &[xk]) if k == xk => Ok(vec![ValueType::f32(x.shape.lead, [n])]),
            _ => Err(format!("{x} times weight '{}' of shape {:?} ([n, k])", w.name, w.shape)),
        }
    }

    fn grouped_matmul(&self) -> Result<Vec<ValueType>, String> {
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

    fn rope(&self, r: &Rope) -> Result<Vec<ValueType>, String> {
        let (x, table) = (self.float(0)?, self.float(1)?);
        self.same_lead(&[x.shape.lead, table.shape.lead])?;
        let dims = table.shape.width();
        if r.head_dim == 0 || !x.shape.width().is_multiple_of(r.head_dim) || dims > r.head_dim {
            return Err(format!("{x} as heads of {}, with a table of {dims} rotated dimensions", r.head_dim));
        }
        Ok(vec![x.clone()])
    }

    fn paged(&self) -> Result<(usize, usize), String> {
        match self.state.map(|s| &s.kind) {
            Some(StateKind::Paged { widths }) if widths.len() == 2 => Ok((widths[0], widths[1])),
            _ => Err("needs paged state with K and V".to_string()),
        }
    }

    fn store_kv(&self) -> Result<Vec<ValueType>, String> {
        let (k, v, slots) = (self.float(0)?, self.float(1)?, self.indices(2)?);
        self.same_lead(&[k.shape.lead, v.shape.lead, slots])?;
        let (kw, vw) = self.paged()?;
        if (k.shape.width(), v.shape.width()) != (kw, vw) {
            return Err(format!("rows {k} and {v} do not fit state of widths {kw} and {vw}"));
        }
        Ok(vec![])
    }

    fn attend(&self, a: &Attend) -> Result<Vec<ValueType>, String> {
        let q = self.float(0)?;
        self.same_lead(&[q.shape.lead, self.indices(1)?, self.indices(2)?])?;
        if !matches!(self.indices(3)?, Dim::Const(_)) {
            return Err(format!("the page table {} must have a constant capacity", self.inputs[3]));
        }
        let (kw, vw) = self.paged()?;
        let grouped = a.kv_heads > 0
            && a.heads.is_multiple_of(a.kv_heads)
            && kw.is_multiple_of(a.kv_heads)
            && vw.is_multiple_of(a.kv_heads)
            && q.shape.width() == a.heads * (kw / a.kv_heads);
        if !grouped {
            let (h, kv) = (a.heads, a.kv_heads);
            return Err(format!("{q} as {h} heads over {kv} KV heads of state widths {kw} and {vw}"));
        }
        Ok(vec![ValueType::f32(q.shape.lead, [a.heads * (vw / a.kv_heads)])])
    }

    fn router(&self, r: &Router) -> Result<Vec<ValueType>, String> {
        let x = self.float(0)?;
        if r.top_k == 0 || r.top_k > x.shape.width() {
            return Err(format!("cannot choose {} experts from {x}", r.top_k));
        }
        let lead = x.shape.lead;
        Ok(vec![ValueType::i32(lead, [r.top_k]), ValueType::f32(lead, [r.top_k])])
    }

    fn expert_scale(&self) -> Result<Vec<ValueType>, String> {
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

    fn combine(&self) -> Result<Vec<ValueType>, String> {
        let (y, w) = (self.float(0)?, self.float(1)?);
        self.same_lead(&[y.shape.lead, w.shape.lead])?;
        match (&y.shape.inner[..], &w.shape.inner[..]) {
            (&[slots, n], &[top_k]) if slots == top_k => {
                Ok(vec![ValueType { dtype: DType::F32, shape: Shape::new(y.shape.lead, [n]) }])
            }
            _ => Err(format!("cannot combine {y} with weights {w}")),
        }
    }
}
