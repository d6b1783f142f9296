//! Operand rules of compressed attention and of what goes with it: what they make of good operands, and the words
//! for bad ones.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{decl, f32s, i32s, kv, q8s};
use minfer_format::BlockType::{F32, Q8_0};
use minfer_graph::{
    Attend, AttendWindow, BiasedRouter, Compress, Dim, ExpertWeights, HyperMix, IndexSelect, Norm, Op, Rope,
    RopeStyle, Scoring, StateDecl, StateKind, StorePart, Streams, ValueType, WeightDecl,
};

const STREAMS: Streams = Streams { n: 4, scale: 1.0 };
const MIX: HyperMix = HyperMix { n: 4, iterations: 20, eps: 1e-6 };
const OVERLAP: Compress = Compress { ratio: 4, overlap: true };
const SELECT: IndexSelect = IndexSelect { heads: 2, block: 4, top: 3, pooled: 2, scale: 1.0 };
const SCORING: Scoring = Scoring::SqrtSoftplus;
const ROUTER: BiasedRouter = BiasedRouter { scoring: SCORING, top_k: 2, scale: 1.5 };
const ROPE: Rope = Rope { style: RopeStyle::Interleaved, head_dim: 16 };

const fn window(ratio: usize) -> AttendWindow {
    AttendWindow { attend: Attend { heads: 2, kv_heads: 1, scale: 1.0 }, window: 8, ratio }
}

fn every_op() -> Vec<Op> {
    vec![
        Op::UnitNorm(Norm { eps: 1e-6, group: 8 }),
        Op::HyperMix(MIX),
        Op::StreamWeightedSum(STREAMS),
        Op::StreamMix(STREAMS),
        Op::RopeTail(ROPE),
        Op::Compress(OVERLAP),
        Op::WindowStart(4),
        Op::StorePart(StorePart { part: 1, every: 4 }),
        Op::IndexSelectWeighted(SELECT),
        Op::AttendWindow(window(4)),
        Op::HeadMatMul,
        Op::GatherIds,
        Op::BiasedRouter(ROUTER),
        Op::ExpertWeights(ExpertWeights { scoring: SCORING, scale: 1.5 }),
        Op::ClampedSwiGlu(10.0),
    ]
}

fn good(op: Op, inputs: &[ValueType], w: Option<&WeightDecl>, s: Option<&StateDecl>) -> Vec<String> {
    let inputs: Vec<_> = inputs.iter().collect();
    op.infer(&inputs, w, s).unwrap().iter().map(ToString::to_string).collect()
}

fn bad(op: Op, inputs: &[ValueType], w: Option<&WeightDecl>, s: Option<&StateDecl>) -> String {
    let inputs: Vec<_> = inputs.iter().collect();
    op.infer(&inputs, w, s).unwrap_err()
}

/// Names are in exports: pinned. None is a fusion; with no operands each refuses and does not panic.
#[test]
fn names_and_nothing() {
    let names: Vec<_> = every_op().iter().map(Op::name).collect();
    let expected = "unit_norm hyper_mix stream_weighted_sum stream_mix rope_tail compress window_start store_part \
                    index_select_weighted attend_window head_matmul gather_ids biased_router expert_weights \
                    clamped_swiglu";
    assert_eq!(names.join(" "), expected);
    let (w, s) = (decl("w", F32, &[4]), kv(0, &[16]));
    for op in every_op() {
        assert!(!op.is_fused());
        for (w, s) in [(None, None), (Some(&w), None), (None, Some(&s)), (Some(&w), Some(&s))] {
            assert!(op.infer(&[], w, s).is_err(), "{}", op.name());
        }
    }
}

#[test]
fn streams() {
    let (x, y, post, comb) = (f32s(&[64]), f32s(&[16]), f32s(&[4]), f32s(&[16]));
    let weight = decl("mix", F32, &[27]);
    assert_eq!(
        good(Op::HyperMix(MIX), &[f32s(&[24])], Some(&weight), None),
        ["f32[rows, 4]", "f32[rows, 4]", "f32[rows, 16]"]
    );
    assert_eq!(
        bad(Op::HyperMix(MIX), &[f32s(&[20])], Some(&weight), None),
        "f32[rows, 20] as a mix of 4 streams"
    );
    let sum = Op::StreamWeightedSum(STREAMS);
    assert_eq!(good(sum.clone(), &[x.clone(), post.clone()], None, None), ["f32[rows, 16]"]);
    assert_eq!(
        bad(sum, &[x.clone(), y.clone()], None, None),
        "f32[rows, 16] as one weight for each of 4 streams"
    );
    let mix = Op::StreamMix(STREAMS);
    let inputs = [x.clone(), y.clone(), post.clone(), comb];
    assert_eq!(good(mix.clone(), &inputs, None, None), ["f32[rows, 64]"]);
    assert!(bad(mix, &[x.clone(), y, post.clone(), post], None, None).ends_with("as 4 streams"));
    let norm = Op::UnitNorm(Norm { eps: 1e-6, group: 24 });
    assert_eq!(bad(norm, &[x], None, None), "f32[rows, 64] does not split into groups of 24");
}

#[test]
fn compression() {
    let bias = decl("bias", F32, &[4, 32]);
    let state = |width| StateDecl { name: "s".to_string(), layer: 0, kind: StateKind::Recurrent { width } };
    let inputs = [f32s(&[32]), f32s(&[32]), i32s(&[]), i32s(&[]), i32s(&[])];
    let op = Op::Compress(OVERLAP);
    // 7 rows of kv and gate.
    assert_eq!(good(op.clone(), &inputs, Some(&bias), Some(&state(448))), ["f32[rows, 16]"]);
    assert_eq!(bad(op, &inputs, Some(&bias), Some(&state(64))), "needs recurrent state of 448 numbers");
    assert_eq!(good(Op::WindowStart(4), &[i32s(&[])], None, None), ["i32[rows]"]);
    assert_eq!(bad(Op::WindowStart(0), &[i32s(&[])], None, None), "windows of no positions");
    let (store, cache) = (|part| Op::StorePart(StorePart { part, every: 4 }), kv(0, &[16, 8]));
    let inputs = [f32s(&[8]), i32s(&[]), i32s(&[])];
    assert!(good(store(1), &inputs, None, Some(&cache)).is_empty());
    for part in [0, 2] {
        let text = format!("f32[rows, 8] as part {part} of state of widths [16, 8]");
        assert_eq!(bad(store(part), &inputs, None, Some(&cache)), text);
    }
}

#[test]
fn attention() {
    let pages = ValueType::i32(Dim::Const(4), []);
    let tables = [i32s(&[]), i32s(&[]), pages];
    let inputs = |q: usize, last: Option<ValueType>| -> Vec<ValueType> {
        [f32s(&[q])].into_iter().chain(tables.clone()).chain(last).collect()
    };
    let (sinks, cache) = (decl("sinks", F32, &[2]), kv(0, &[16, 16, 8]));
    let attend = |ratio, inputs: &[ValueType]| {
        good(Op::AttendWindow(window(ratio)), inputs, Some(&sinks), Some(&cache))
    };
    assert_eq!(attend(0, &inputs(32, None)), ["f32[rows, 32]"]);
    assert_eq!(attend(4, &inputs(32, Some(i32s(&[3])))), ["f32[rows, 32]"]);
    let refuse = |ratio, inputs: &[ValueType]| {
        bad(Op::AttendWindow(window(ratio)), inputs, Some(&sinks), Some(&cache))
    };
    assert_eq!(
        refuse(0, &inputs(32, Some(i32s(&[3])))),
        "i32[rows, 3] is not a list of compressed rows per row"
    );
    assert!(refuse(4, &inputs(16, None)).starts_with("f32[rows, 16] over state of widths [16, 16, 8]"));
    assert_eq!(refuse(4, &inputs(32, None)[..3]), "takes 4 or 5 inputs, got 3");
    let select = Op::IndexSelectWeighted(SELECT);
    assert_eq!(good(select.clone(), &inputs(16, Some(f32s(&[2]))), None, Some(&cache)), ["i32[rows, 3]"]);
    assert_eq!(
        bad(select, &inputs(16, Some(f32s(&[3]))), None, Some(&cache)),
        "f32[rows, 16] with f32[rows, 3] as 2 heads over state of widths [16, 16, 8]"
    );
}

#[test]
fn products_and_routing() {
    for (ty, x) in [(F32, f32s(&[96])), (F32, f32s(&[3, 32])), (Q8_0, q8s(&[3, 32]))] {
        let w = decl("w", ty, &[3, 5, 32]);
        assert_eq!(good(Op::HeadMatMul, &[x], Some(&w), None), ["f32[rows, 15]"]);
    }
    let w = decl("w", Q8_0, &[3, 5, 32]);
    assert_eq!(
        bad(Op::HeadMatMul, &[q8s(&[96])], Some(&w), None),
        "q8[rows, 96] times weight 'w' of shape [3, 5, 32] ([groups, n, k])"
    );
    let ids = decl("ids", F32, &[100, 2]);
    assert_eq!(good(Op::GatherIds, &[i32s(&[])], Some(&ids), None), ["i32[rows, 2]"]);
    let bias = decl("bias", F32, &[8]);
    assert_eq!(
        good(Op::BiasedRouter(ROUTER), &[f32s(&[8])], Some(&bias), None),
        ["i32[rows, 2]", "f32[rows, 2]"]
    );
    let weights = Op::ExpertWeights(ExpertWeights { scoring: SCORING, scale: 1.5 });
    assert_eq!(good(weights.clone(), &[f32s(&[8]), i32s(&[2])], None, None), ["f32[rows, 2]"]);
    assert_eq!(
        bad(weights, &[f32s(&[8]), f32s(&[2])], None, None),
        "input 1 is f32[rows, 2], not i32 expert ids per row"
    );
}
