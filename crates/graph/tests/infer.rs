//! Operand rules of every operation: what it makes of good operands, and the words for bad ones.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{decl, f32s, i32s, kv, pooled, q8s};
use minfer_format::BlockType::{BF16, F16, F32, Q4_0, Q8_0};
use minfer_graph::{
    Act, ActKind, Attend, AttendBlocks, Clamp, Conv1d, DType, DeltaRule, Dim, HyperMix, IndexSelect, Norm,
    Op, PoolGated, PoolKeys, Rope, RopeStyle, RopeTable, Router, Scoring, Slice, StateDecl, StateKind,
    Streams, ValueType, WeightDecl,
};

fn good(op: Op, inputs: &[ValueType], w: Option<&WeightDecl>, s: Option<&StateDecl>) -> Vec<String> {
    let inputs: Vec<_> = inputs.iter().collect();
    op.infer(&inputs, w, s).unwrap().iter().map(ToString::to_string).collect()
}

fn bad(op: Op, inputs: &[ValueType], w: Option<&WeightDecl>, s: Option<&StateDecl>) -> String {
    let inputs: Vec<_> = inputs.iter().collect();
    op.infer(&inputs, w, s).unwrap_err()
}

fn norm(group: usize) -> Norm {
    Norm { eps: 1e-5, group }
}

#[test]
fn embed() {
    let table = decl("table", Q4_0, &[100, 64]);
    assert_eq!(good(Op::Embed, &[i32s(&[])], Some(&table), None), ["f32[rows, 64]"]);
    assert_eq!(
        bad(Op::Embed, &[f32s(&[])], Some(&table), None),
        "input 0 is f32[rows], not i32 ids, one or several per row"
    );
    assert_eq!(
        good(Op::Embed, &[i32s(&[2])], Some(&table), None),
        ["f32[rows, 128]"],
        "two rows side by side"
    );
    let flat = decl("flat", F32, &[100]);
    assert_eq!(
        bad(Op::Embed, &[i32s(&[])], Some(&flat), None),
        "weight 'flat' has shape [100], expected [vocab, hidden]"
    );
}

#[test]
fn operand_counts() {
    let w = decl("w", F32, &[64]);
    let s = kv(0, &[8, 8]);
    let x = f32s(&[64]);
    assert_eq!(bad(Op::Add, std::slice::from_ref(&x), None, None), "takes 2 inputs, got 1");
    assert_eq!(bad(Op::Silu, &[x.clone(), x.clone()], None, None), "takes 1 inputs, got 2");
    assert_eq!(bad(Op::RmsNorm(norm(64)), std::slice::from_ref(&x), None, None), "needs a weight");
    assert_eq!(bad(Op::Silu, std::slice::from_ref(&x), Some(&w), None), "does not take a weight");
    assert_eq!(bad(Op::Silu, std::slice::from_ref(&x), None, Some(&s)), "does not take a state");
    assert_eq!(bad(Op::StoreKv, &[x.clone(), x, i32s(&[])], None, None), "needs a state");
}

/// Every operation, with no operands at all, refuses and does not panic.
#[test]
fn nothing_is_refused_by_every_op() {
    for op in every_op() {
        let text = op.infer(&[], None, None).unwrap_err();
        assert!(text.starts_with("takes ") || text == "needs a state", "{}: {text}", op.name());
    }
}

/// Names are in exports: pinned, distinct.
#[test]
fn names_are_pinned() {
    let names: Vec<_> = every_op().iter().map(Op::name).collect();
    let expected = "embed rms_norm quantize matmul grouped_matmul bias_add add mul silu rope_table rope store_kv \
                    attend router combine_experts gather_rows argmax swiglu rms_norm_quantize swiglu_quantize \
                    add_rms_norm scale expert_scale act scale_vec slice reshape repeat stream_sum stream_dot stream_mul \
                    stream_add conv1d delta_rule pool_keys index_select attend_blocks unit_norm layer_norm \
                    head_matmul clamp stream_weighted_sum stream_mix hyper_mix pool_gated concat";
    assert_eq!(names.join(" "), expected);
    let fused: Vec<_> = every_op().iter().filter(|o| o.is_fused()).map(Op::name).collect();
    assert_eq!(fused, ["swiglu", "rms_norm_quantize", "swiglu_quantize", "add_rms_norm"]);
}

fn every_op() -> Vec<Op> {
    vec![
        Op::Embed,
        Op::RmsNorm(norm(64)),
        Op::Quantize,
        Op::MatMul,
        Op::GroupedMatMul,
        Op::BiasAdd,
        Op::Add,
        Op::Mul,
        Op::Silu,
        Op::RopeTable(table(4)),
        Op::Rope(Rope { style: RopeStyle::HalfSplit, head_dim: 8 }),
        Op::StoreKv,
        Op::Attend(Attend { heads: 2, kv_heads: 1, scale: 1.0, v_part: 1 }),
        Op::Router(router(2)),
        Op::CombineExperts,
        Op::GatherRows,
        Op::ArgMax,
        Op::SwiGlu,
        Op::RmsNormQuantize(norm(64)),
        Op::SwiGluQuantize,
        Op::AddRmsNorm(norm(64)),
        Op::Scale,
        Op::ExpertScale,
        Op::Act(Act { kind: ActKind::Sigmoid, pre: 1.0, post: 1.0 }),
        Op::ScaleVec,
        Op::Slice(Slice { group: 8, from: 0, len: 4 }),
        Op::Reshape(vec![2, 4]),
        Op::Repeat(STREAMS),
        Op::StreamSum(STREAMS),
        Op::StreamDot(STREAMS),
        Op::StreamMul(STREAMS),
        Op::StreamAdd(STREAMS),
        Op::Conv1d(CONV),
        Op::DeltaRule(RULE),
        Op::PoolKeys(pool()),
        Op::IndexSelect(SELECT),
        Op::AttendBlocks(AttendBlocks {
            attend: Attend { heads: 2, kv_heads: 1, scale: 1.0, v_part: 1 },
            block: 4,
        }),
        Op::UnitNorm(norm(64)),
        Op::LayerNorm(norm(64)),
        Op::HeadMatMul,
        Op::Clamp(Clamp { low: -1.0, high: 1.0 }),
        Op::StreamWeightedSum(STREAMS),
        Op::StreamMix(STREAMS),
        Op::HyperMix(MIX),
        Op::PoolGated(GATED),
        Op::Concat,
    ]
}

fn table(pairs: usize) -> RopeTable {
    RopeTable { inv_freq: vec![1.0; pairs].into(), attention_factor: 1.0 }
}

fn router(top_k: usize) -> Router {
    Router { scoring: Scoring::Softmax, top_k, renormalise: true, biased: false, scale: 1.0 }
}

#[test]
fn norms() {
    let w = decl("norm", F32, &[64]);
    for op in [Op::RmsNorm(norm(64)), Op::RmsNormQuantize(norm(64))] {
        let out = if op.is_fused() { "q8" } else { "f32" };
        assert_eq!(good(op.clone(), &[f32s(&[64])], Some(&w), None), [format!("{out}[rows, 64]")]);
        assert_eq!(good(op.clone(), &[f32s(&[256])], Some(&w), None), [format!("{out}[rows, 256]")], "heads");
        assert_eq!(
            bad(op.clone(), &[f32s(&[100])], Some(&w), None),
            "f32[rows, 100] does not split into groups of 64"
        );
        assert_eq!(bad(op, &[q8s(&[64])], Some(&w), None), "input 0 is q8[rows, 64], not f32");
    }
    assert_eq!(
        bad(Op::RmsNorm(norm(32)), &[f32s(&[128])], Some(&w), None),
        "weight 'norm' has shape [64], expected [32]"
    );
    assert_eq!(good(Op::RmsNorm(norm(32)), &[f32s(&[64])], Some(&w), None), ["f32[rows, 64]"], "own weights");
    let none = decl("none", F32, &[0]);
    assert_eq!(
        bad(Op::RmsNorm(norm(0)), &[f32s(&[64])], Some(&none), None),
        "f32[rows, 64] does not split into groups of 0"
    );
    let add = Op::AddRmsNorm(norm(64));
    assert_eq!(good(add.clone(), &[f32s(&[64]), f32s(&[64])], Some(&w), None), ["f32[rows, 64]"; 2]);
    assert_eq!(
        bad(add, &[f32s(&[64]), f32s(&[128])], Some(&w), None),
        "inputs differ: f32[rows, 64] and f32[rows, 128]"
    );
}

#[test]
fn quantize() {
    assert_eq!(good(Op::Quantize, &[f32s(&[4, 64])], None, None), ["q8[rows, 4, 64]"]);
    assert_eq!(
        bad(Op::Quantize, &[f32s(&[40])], None, None),
        "rows of f32[rows, 40] are not a multiple of 32 numbers"
    );
    assert_eq!(bad(Op::Quantize, &[q8s(&[64])], None, None), "input 0 is q8[rows, 64], not f32");
    assert_eq!(
        bad(Op::RmsNormQuantize(norm(8)), &[f32s(&[40])], Some(&decl("n", F32, &[8])), None),
        "rows of f32[rows, 40] are not a multiple of 32 numbers"
    );
}

#[test]
fn matmul() {
    let (plain, packed) = (decl("w", BF16, &[32, 64]), decl("q", Q4_0, &[32, 64]));
    assert_eq!(good(Op::MatMul, &[f32s(&[64])], Some(&plain), None), ["f32[rows, 32]"]);
    assert_eq!(good(Op::MatMul, &[q8s(&[64])], Some(&packed), None), ["f32[rows, 32]"]);
    assert_eq!(
        bad(Op::MatMul, &[f32s(&[64])], Some(&packed), None),
        "weight 'q' (Q4_0) takes q8 activations, got f32[rows, 64]"
    );
    assert_eq!(
        bad(Op::MatMul, &[q8s(&[64])], Some(&plain), None),
        "weight 'w' (BF16) takes f32 activations, got q8[rows, 64]"
    );
    let text = bad(Op::MatMul, &[f32s(&[32])], Some(&plain), None);
    assert_eq!(text, "f32[rows, 32] times weight 'w' of shape [32, 64] ([n, k])");
    assert!(
        bad(Op::MatMul, &[f32s(&[2, 2, 64])], Some(&plain), None)
            .starts_with("f32[rows, 2, 2, 64] times weight")
    );
    assert_eq!(good(Op::MatMul, &[f32s(&[2, 64])], Some(&plain), None), ["f32[rows, 2, 32]"], "parts");
}

#[test]
fn grouped_matmul() {
    let w = decl("experts", Q8_0, &[8, 32, 64]);
    let op = Op::GroupedMatMul;
    assert_eq!(good(op.clone(), &[q8s(&[64]), i32s(&[2])], Some(&w), None), ["f32[rows, 2, 32]"]);
    assert_eq!(good(op.clone(), &[q8s(&[2, 64]), i32s(&[2])], Some(&w), None), ["f32[rows, 2, 32]"]);
    for (x, ids) in [
        (q8s(&[32]), i32s(&[2])),
        (q8s(&[3, 64]), i32s(&[2])),
        (q8s(&[64]), f32s(&[2])),
        (q8s(&[64]), i32s(&[])),
        (q8s(&[64]), ValueType::i32(Dim::Outs, [2])),
    ] {
        let expected =
            format!("{x} with experts {ids} times weight 'experts' of shape [8, 32, 64] ([experts, n, k])");
        assert_eq!(bad(op.clone(), &[x, ids], Some(&w), None), expected);
    }
}

#[test]
fn elementwise() {
    for op in [Op::Add, Op::Mul, Op::SwiGlu, Op::SwiGluQuantize] {
        let out = if op == Op::SwiGluQuantize { "q8" } else { "f32" };
        assert_eq!(good(op.clone(), &[f32s(&[64]), f32s(&[64])], None, None), [format!("{out}[rows, 64]")]);
        assert_eq!(
            bad(op.clone(), &[f32s(&[64]), ValueType::f32(Dim::Outs, [64])], None, None),
            "inputs differ: f32[rows, 64] and f32[outs, 64]"
        );
        assert_eq!(bad(op, &[f32s(&[64]), i32s(&[64])], None, None), "input 1 is i32[rows, 64], not f32");
    }
    assert_eq!(good(Op::Silu, &[f32s(&[2, 3])], None, None), ["f32[rows, 2, 3]"]);
    let half = ValueType { dtype: DType::F16, ..f32s(&[3]) };
    assert_eq!(bad(Op::Silu, &[half], None, None), "input 0 is f16[rows, 3], not f32");
    let bias = decl("bias", F16, &[6]);
    assert_eq!(good(Op::BiasAdd, &[f32s(&[6])], Some(&bias), None), ["f32[rows, 6]"]);
    assert_eq!(
        bad(Op::BiasAdd, &[f32s(&[5])], Some(&bias), None),
        "weight 'bias' has shape [6], expected [5]"
    );
}

#[test]
fn rope() {
    assert_eq!(good(Op::RopeTable(table(4)), &[i32s(&[])], None, None), ["f32[rows, 8]"]);
    assert_eq!(
        bad(Op::RopeTable(table(4)), &[f32s(&[])], None, None),
        "input 0 is f32[rows], not a vector of i32"
    );
    let op = |head_dim| Op::Rope(Rope { style: RopeStyle::Interleaved, head_dim });
    assert_eq!(good(op(16), &[f32s(&[64]), f32s(&[16])], None, None), ["f32[rows, 64]"]);
    assert_eq!(good(op(16), &[f32s(&[64]), f32s(&[8])], None, None), ["f32[rows, 64]"], "partial");
    for (head_dim, dims) in [(16, 32), (0, 8), (48, 8)] {
        assert_eq!(
            bad(op(head_dim), &[f32s(&[64]), f32s(&[dims])], None, None),
            format!("f32[rows, 64] as heads of {head_dim}, with a table of {dims} rotated dimensions")
        );
    }
    assert_eq!(
        bad(op(16), &[f32s(&[64]), ValueType::f32(Dim::Outs, [16])], None, None),
        "leading dimensions differ: f32[rows, 64], f32[outs, 16]"
    );
}

#[test]
fn store_kv() {
    let s = kv(0, &[32, 16]);
    let store = |k: usize, v: usize, slots| [f32s(&[k]), f32s(&[v]), slots];
    assert!(good(Op::StoreKv, &store(32, 16, i32s(&[])), None, Some(&s)).is_empty());
    assert_eq!(
        bad(Op::StoreKv, &store(16, 32, i32s(&[])), None, Some(&s)),
        "rows f32[rows, 16], f32[rows, 32], i32[rows] do not fit state of widths [32, 16]"
    );
    assert_eq!(
        bad(Op::StoreKv, &store(32, 16, ValueType::i32(Dim::Outs, [])), None, Some(&s)),
        "leading dimensions differ: f32[rows, 32], f32[rows, 16], i32[outs]"
    );
    let one = kv(0, &[32]);
    assert_eq!(
        bad(Op::StoreKv, &store(32, 16, i32s(&[])), None, Some(&one)),
        "needs paged state with K and V"
    );
}

const STREAMS: Streams = Streams { n: 4, scale: 0.25 };
const CONV: Conv1d = Conv1d { kernel: 4, dilation: 3 };
const RULE: DeltaRule =
    DeltaRule { k_heads: 2, v_heads: 4, k_dim: 8, v_dim: 16, tiled: false, per_channel: false };
const SELECT: IndexSelect =
    IndexSelect { heads: 2, block: 4, top: 3, pooled: 3, scale: 1.0, weighted: false };

const MIX: HyperMix = HyperMix { n: 4, iterations: 20, eps: 1e-6 };
const GATED: PoolGated = PoolGated { block: 4, raw: 1, gates: 2, pooled: 3 };

fn pool() -> PoolKeys {
    PoolKeys { block: 4, raw: 2, pooled: 3, eps: 1e-6, inv_freq: [1.0; 4].into() }
}

fn recurrent(width: usize) -> StateDecl {
    StateDecl { name: "state".to_string(), layer: 0, kind: StateKind::Recurrent { width } }
}

#[test]
fn streams() {
    let (h, y, w) = (f32s(&[64]), f32s(&[16]), f32s(&[4]));
    assert_eq!(good(Op::Repeat(STREAMS), std::slice::from_ref(&y), None, None), ["f32[rows, 64]"]);
    assert_eq!(good(Op::StreamSum(STREAMS), std::slice::from_ref(&h), None, None), ["f32[rows, 16]"]);
    assert_eq!(good(Op::StreamDot(STREAMS), &[h.clone(), h.clone()], None, None), ["f32[rows, 4]"]);
    assert_eq!(good(Op::StreamMul(STREAMS), &[y.clone(), w.clone()], None, None), ["f32[rows, 64]"]);
    assert_eq!(
        good(Op::StreamAdd(STREAMS), &[h.clone(), y.clone(), w.clone()], None, None),
        ["f32[rows, 64]"]
    );
    assert_eq!(
        bad(Op::StreamAdd(STREAMS), &[y.clone(), y, w.clone()], None, None),
        "f32[rows, 16], f32[rows, 16], f32[rows, 4] as 4 streams"
    );
    assert_eq!(
        bad(Op::StreamMul(STREAMS), &[w.clone(), h], None, None),
        "f32[rows, 64] as one weight for each of 4 streams"
    );
    let slice = |group, from, len| Op::Slice(Slice { group, from, len });
    assert_eq!(good(slice(8, 2, 6), &[f32s(&[64])], None, None), ["f32[rows, 48]"]);
    for refused in [slice(8, 4, 5), slice(0, 0, 1), slice(7, 0, 1), slice(8, 0, 0)] {
        assert!(bad(refused, &[f32s(&[64])], None, None).ends_with("of f32[rows, 64]"));
    }
}

#[test]
fn recurrent_ops() {
    let (x, slot) = (f32s(&[64]), i32s(&[]));
    let conv = [x.clone(), slot.clone(), slot.clone()];
    let (w, state) = (decl("w", F32, &[64, 4]), recurrent(9 * 64));
    assert_eq!(good(Op::Conv1d(CONV), &conv, Some(&w), Some(&state)), ["f32[rows, 64]"]);
    assert_eq!(
        bad(Op::Conv1d(CONV), &conv, Some(&w), Some(&recurrent(64))),
        "needs recurrent state of 576 numbers"
    );
    let heads = f32s(&[4]);
    let delta = [f32s(&[2 * 16 + 64]), heads.clone(), heads, slot.clone(), slot.clone()];
    let state = recurrent(4 * 8 * 16);
    assert_eq!(good(Op::DeltaRule(RULE), &delta, None, Some(&state)), ["f32[rows, 64]"]);
    let channels = Op::DeltaRule(DeltaRule { per_channel: true, ..RULE });
    assert!(bad(channels.clone(), &delta, None, Some(&state)).contains("per_channel: true"));
    let mut each = delta.clone();
    each[1] = f32s(&[4 * 8]);
    assert_eq!(good(channels, &each, None, Some(&state)), ["f32[rows, 64]"]);
    let mut wrong = delta.clone();
    wrong[0] = x;
    assert!(bad(Op::DeltaRule(RULE), &wrong, None, Some(&state)).starts_with("f32[rows, 64], f32[rows, 4]"));
}

#[test]
fn sparse_attention() {
    let state = pooled(&[32, 32, 16, 16], 3, 4);
    let (rows, pages) = (i32s(&[]), ValueType::i32(Dim::Const(9), []));
    let norm = decl("norm", F32, &[16]);
    let tables = [rows.clone(), rows.clone(), pages.clone(), rows.clone()];
    assert!(good(Op::PoolKeys(pool()), &tables, Some(&norm), Some(&state)).is_empty());
    assert_eq!(
        bad(Op::PoolKeys(pool()), &tables, Some(&norm), Some(&kv(0, &[32, 32]))),
        "parts 2 and 3 of state of widths [32, 32]"
    );
    for (every, text) in [
        (1, "part 3 of the state has no row for every 4 positions"),
        (3, "rows for every 3 positions do not fit pages of 64"),
        (0, "rows for every 0 positions do not fit pages of 64"),
    ] {
        let state = pooled(&[32, 32, 16, 16], 3, every);
        assert!(bad(Op::PoolKeys(pool()), &tables, Some(&norm), Some(&state)).contains(text));
    }
    let select = [f32s(&[32]), rows.clone(), rows.clone(), pages.clone()];
    assert_eq!(good(Op::IndexSelect(SELECT), &select, None, Some(&state)), ["i32[rows, 3]"]);
    let attend = Op::AttendBlocks(AttendBlocks {
        attend: Attend { heads: 4, kv_heads: 2, scale: 1.0, v_part: 1 },
        block: 4,
    });
    let inputs = [f32s(&[64]), rows.clone(), rows.clone(), pages, i32s(&[3])];
    assert_eq!(good(attend.clone(), &inputs, None, Some(&state)), ["f32[rows, 64]"]);
    let mut wrong = inputs.clone();
    wrong[4] = f32s(&[3]);
    assert_eq!(
        bad(attend, &wrong, None, Some(&state)),
        "input 4 is f32[rows, 3], not i32 block ids per row (blocks of 4)"
    );
}

#[test]
fn heads_of_a_row() {
    let w = decl("w", F32, &[4, 24, 16]);
    assert_eq!(good(Op::HeadMatMul, &[f32s(&[4, 16])], Some(&w), None), ["f32[rows, 96]"]);
    assert_eq!(
        bad(Op::HeadMatMul, &[f32s(&[64])], Some(&w), None),
        "f32[rows, 64] times weight 'w' of shape [4, 24, 16] ([heads, n, k])"
    );
    let q8 = decl("w", Q4_0, &[4, 24, 32]);
    assert!(bad(Op::HeadMatMul, &[f32s(&[4, 32])], Some(&q8), None).contains("takes q8 activations"));
    let both = decl("norm", F32, &[2 * 16]);
    assert_eq!(good(Op::LayerNorm(norm(16)), &[f32s(&[64])], Some(&both), None), ["f32[rows, 64]"]);
    assert!(bad(Op::LayerNorm(norm(32)), &[f32s(&[64])], Some(&both), None).contains("expected [64]"));
    assert_eq!(good(Op::UnitNorm(norm(16)), &[f32s(&[64])], None, None), ["f32[rows, 64]"]);
    assert!(bad(Op::UnitNorm(norm(0)), &[f32s(&[64])], None, None).contains("groups of 0"));
    let scale = decl("scale", F32, &[4]);
    assert_eq!(good(Op::ScaleVec, &[f32s(&[64])], Some(&scale), None), ["f32[rows, 64]"]);
    assert_eq!(
        bad(Op::ScaleVec, &[f32s(&[63])], Some(&scale), None),
        "weight 'scale' of shape [4] does not divide f32[rows, 63]"
    );
    let clamp = |low, high| Op::Clamp(Clamp { low, high });
    assert_eq!(good(clamp(f32::NEG_INFINITY, 2.0), &[f32s(&[64])], None, None), ["f32[rows, 64]"]);
    assert!(bad(clamp(2.0, 1.0), &[f32s(&[64])], None, None).contains("between 2 and 1"));
    assert!(bad(clamp(f32::NAN, 1.0), &[f32s(&[64])], None, None).contains("between NaN and 1"));
}

#[test]
fn rows_side_by_side() {
    assert_eq!(good(Op::Concat, &[f32s(&[64]), f32s(&[2, 3]), f32s(&[1])], None, None), ["f32[rows, 71]"]);
    assert_eq!(bad(Op::Concat, &[f32s(&[64]), i32s(&[3])], None, None), "input 1 is i32[rows, 3], not f32");
    let other = ValueType::f32(Dim::Outs, [3]);
    assert!(bad(Op::Concat, &[f32s(&[64]), other], None, None).starts_with("leading dimensions differ"));
}

#[test]
fn hyper_connections() {
    let (h, y, w, comb) = (f32s(&[64]), f32s(&[16]), f32s(&[4]), f32s(&[16]));
    let sum = Op::StreamWeightedSum(STREAMS);
    assert_eq!(good(sum.clone(), &[h.clone(), w.clone()], None, None), ["f32[rows, 16]"]);
    assert_eq!(
        bad(sum, &[h.clone(), y.clone()], None, None),
        "input 1 is f32[rows, 16], expected 4 numbers in each row of f32[rows, 64], f32[rows, 16]"
    );
    let mix = [h.clone(), y, w, comb];
    assert_eq!(good(Op::StreamMix(STREAMS), &mix, None, None), ["f32[rows, 64]"]);
    let mut wrong = mix.clone();
    wrong[3] = h.clone();
    assert!(
        bad(Op::StreamMix(STREAMS), &wrong, None, None).starts_with("input 3 is f32[rows, 64], expected 16")
    );
    let constants = decl("base + scale", F32, &[27]);
    assert_eq!(
        good(Op::HyperMix(MIX), &[f32s(&[24])], Some(&constants), None),
        ["f32[rows, 4]", "f32[rows, 4]", "f32[rows, 16]"]
    );
    assert!(bad(Op::HyperMix(MIX), &[h], Some(&constants), None).contains("expected 24 numbers"));
    let none = Op::HyperMix(HyperMix { iterations: 0, ..MIX });
    assert_eq!(bad(none, &[f32s(&[24])], Some(&constants), None), "4 streams in 0 iterations");
}

/// One latent for all heads, key and value at once; keys pooled by gates; heads with weights.
#[test]
fn latent_attention() {
    let state = pooled(&[32, 16, 16, 16], 3, 4);
    let (rows, pages) = (i32s(&[]), ValueType::i32(Dim::Const(9), []));
    let tables = [rows.clone(), rows.clone(), pages.clone(), rows.clone()];
    let bias = decl("bias", F32, &[64]);
    assert!(good(Op::PoolGated(GATED), &tables, Some(&bias), Some(&state)).is_empty());
    let other = Op::PoolGated(PoolGated { gates: 0, ..GATED });
    assert!(
        bad(other, &tables, Some(&bias), Some(&state)).ends_with("over state of widths [32, 16, 16, 16]")
    );
    let over = Op::PoolGated(PoolGated { pooled: 1, ..GATED });
    assert!(bad(over, &tables, Some(&bias), Some(&state)).starts_with("PoolGated"));
    let select = Op::IndexSelect(IndexSelect { weighted: true, ..SELECT });
    let inputs = [f32s(&[32]), rows.clone(), rows.clone(), pages.clone(), f32s(&[2])];
    assert_eq!(good(select.clone(), &inputs, None, Some(&state)), ["i32[rows, 3]"]);
    assert_eq!(bad(select.clone(), &inputs[..4], None, Some(&state)), "takes 5 inputs, got 4");
    let mut wrong = inputs.clone();
    wrong[4] = f32s(&[3]);
    assert_eq!(bad(select, &wrong, None, Some(&state)), "f32[rows, 3] as weights of 2 heads");
    let attend = |v_part| Op::Attend(Attend { heads: 4, kv_heads: 1, scale: 1.0, v_part });
    let inputs = [f32s(&[4 * 32]), rows.clone(), rows, pages];
    assert_eq!(good(attend(0), &inputs, None, Some(&state)), ["f32[rows, 128]"]);
    assert_eq!(good(attend(1), &inputs, None, Some(&state)), ["f32[rows, 64]"]);
    assert_eq!(
        bad(attend(4), &inputs, None, Some(&state)),
        "values in part 4 of state of widths [32, 16, 16, 16]"
    );
}

#[test]
fn attend() {
    let s = kv(0, &[32, 16]);
    let pages = ValueType::i32(Dim::Const(9), []);
    let op = |heads, kv_heads| Op::Attend(Attend { heads, kv_heads, scale: 1.0, v_part: 1 });
    let with = |q: usize, pages: &ValueType| [f32s(&[q]), i32s(&[]), i32s(&[]), pages.clone()];
    assert_eq!(good(op(4, 2), &with(64, &pages), None, Some(&s)), ["f32[rows, 32]"], "4 heads of v's 8");
    for (heads, kv_heads, q) in [(4, 0, 64), (3, 2, 48), (4, 2, 63), (4, 3, 64), (6, 3, 60)] {
        assert_eq!(
            bad(op(heads, kv_heads), &with(q, &pages), None, Some(&s)),
            format!("f32[rows, {q}] as {heads} heads over {kv_heads} KV heads of state widths 32 and 16")
        );
    }
    assert_eq!(
        bad(op(4, 2), &with(64, &i32s(&[])), None, Some(&s)),
        "the page table i32[rows] must have a constant capacity"
    );
    let outs = [f32s(&[64]), ValueType::i32(Dim::Outs, []), i32s(&[]), pages];
    assert!(bad(op(4, 2), &outs, None, Some(&s)).starts_with("leading dimensions differ"));
}

#[test]
fn experts() {
    assert_eq!(good(Op::Router(router(2)), &[f32s(&[8])], None, None), ["i32[rows, 2]", "f32[rows, 2]"]);
    assert_eq!(good(Op::Router(router(8)), &[f32s(&[8])], None, None).len(), 2);
    let biased = Op::Router(Router { biased: true, ..router(2) });
    let bias = decl("bias", F32, &[8]);
    assert_eq!(good(biased.clone(), &[f32s(&[8])], Some(&bias), None).len(), 2);
    assert_eq!(bad(biased.clone(), &[f32s(&[8])], None, None), "needs a weight");
    assert!(bad(biased, &[f32s(&[9])], Some(&bias), None).contains("expected [9]"));
    for top_k in [0, 9] {
        let text = format!("cannot choose {top_k} experts from f32[rows, 8]");
        assert_eq!(bad(Op::Router(router(top_k)), &[f32s(&[8])], None, None), text);
    }
    assert_eq!(good(Op::CombineExperts, &[f32s(&[2, 16]), f32s(&[2])], None, None), ["f32[rows, 16]"]);
    for (y, w) in [(f32s(&[3, 16]), f32s(&[2])), (f32s(&[16]), f32s(&[2])), (f32s(&[2, 16]), f32s(&[]))] {
        let text = format!("cannot combine {y} with weights {w}");
        assert_eq!(bad(Op::CombineExperts, &[y, w], None, None), text);
    }
}

#[test]
fn rows() {
    let outs = ValueType::i32(Dim::Outs, []);
    assert_eq!(good(Op::GatherRows, &[f32s(&[4, 8]), outs], None, None), ["f32[outs, 4, 8]"]);
    assert_eq!(
        bad(Op::GatherRows, &[f32s(&[8]), f32s(&[])], None, None),
        "input 1 is f32[rows], not a vector of i32"
    );
    assert_eq!(good(Op::ArgMax, &[ValueType::f32(Dim::Outs, [99])], None, None), ["i32[outs]"]);
    assert_eq!(bad(Op::ArgMax, &[i32s(&[9])], None, None), "input 0 is i32[rows, 9], not f32");
}
