//! Operand rules of compressed attention and of what goes with it: what they make of good operands, and the words
//! for bad ones.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{decl, f32s, i32s, kv, pooled};
use minfer_format::BlockType::F32;
use minfer_graph::{
    Attend, AttendWindow, Compress, Dim, ExpertWeights, IndexSelect, Op, Rope, RopeStyle, RoundFormat,
    RoundTrip, Router, Scoring, StateDecl, StateKind, StorePart, ValueType, WeightDecl,
};

const OVERLAP: Compress = Compress { ratio: 4, overlap: true };
const SELECT: IndexSelect = IndexSelect { heads: 2, block: 4, top: 3, pooled: 2, scale: 1.0, weighted: true };
const SCORING: Scoring = Scoring::SqrtSoftplus;
const ROUTER: Router = Router { scoring: SCORING, top_k: 2, renormalise: true, biased: true, scale: 1.5 };
const ROPE: Rope = Rope { style: RopeStyle::Interleaved, head_dim: 16 };

const fn window(ratio: usize) -> AttendWindow {
    AttendWindow { attend: Attend { heads: 2, kv_heads: 1, scale: 1.0, v_part: 0 }, window: 8, ratio }
}

fn every_op() -> Vec<Op> {
    vec![
        Op::RopeTail(ROPE),
        Op::Compress(OVERLAP),
        Op::WindowStart(4),
        Op::ZeroFirst,
        Op::StorePart(StorePart { part: 1, every: 4 }),
        Op::AttendWindow(window(4)),
        Op::GatherIds,
        Op::ExpertWeights(ExpertWeights { scoring: SCORING, scale: 1.5 }),
        Op::RoundTrip(RoundTrip { group: 64, format: RoundFormat::Fp4Hadamard { block: 32 } }),
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
    let expected = "rope_tail compress window_start zero_first store_part attend_window gather_ids expert_weights round_trip";
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
    assert_eq!(good(Op::ZeroFirst, &[f32s(&[4, 8]), i32s(&[])], None, None), ["f32[rows, 4, 8]"]);
    assert!(bad(Op::ZeroFirst, &[f32s(&[8]), f32s(&[])], None, None).contains("i32"));
    let (store, cache) = (|part| Op::StorePart(StorePart { part, every: 4 }), pooled(&[16, 8], 1, 4));
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
    let tables = [i32s(&[]), i32s(&[]), pages.clone(), pages];
    let inputs = |q: usize, last: Option<ValueType>| -> Vec<ValueType> {
        [f32s(&[q])].into_iter().chain(tables.clone()).chain(last).collect()
    };
    let (sinks, cache) = (decl("sinks", F32, &[2]), pooled(&[16, 16, 8], 1, 4));
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
    assert_eq!(refuse(4, &inputs(32, None)[..3]), "takes 5 or 6 inputs, got 3");
    let mut short = inputs(32, None);
    short[4] = ValueType::i32(Dim::Const(3), []);
    assert_eq!(refuse(4, &short), "page tables i32[4] and i32[3] differ");
    let select = Op::IndexSelect(SELECT);
    let weighted = |heads| {
        let mut inputs = inputs(16, Some(f32s(&[heads])));
        inputs.remove(4);
        inputs
    };
    assert_eq!(good(select.clone(), &weighted(2), None, Some(&cache)), ["i32[rows, 3]"]);
    assert_eq!(bad(select, &weighted(3), None, Some(&cache)), "f32[rows, 3] as weights of 2 heads");
}

#[test]
fn routing() {
    let ids = decl("ids", F32, &[100, 2]);
    assert_eq!(good(Op::GatherIds, &[i32s(&[])], Some(&ids), None), ["i32[rows, 2]"]);
    let bias = decl("bias", F32, &[8]);
    assert_eq!(good(Op::Router(ROUTER), &[f32s(&[8])], Some(&bias), None), ["i32[rows, 2]", "f32[rows, 2]"]);
    let weights = Op::ExpertWeights(ExpertWeights { scoring: SCORING, scale: 1.5 });
    assert_eq!(good(weights.clone(), &[f32s(&[8]), i32s(&[2])], None, None), ["f32[rows, 2]"]);
    assert_eq!(
        bad(weights, &[f32s(&[8]), f32s(&[2])], None, None),
        "input 1 is f32[rows, 2], not i32 expert ids per row"
    );
}

#[test]
fn round_trips() {
    let fp8 = |group, block, from, len| {
        Op::RoundTrip(RoundTrip { group, format: RoundFormat::Fp8 { block, from, len } })
    };
    let fp4 = |group, block| Op::RoundTrip(RoundTrip { group, format: RoundFormat::Fp4Hadamard { block } });
    assert_eq!(good(fp8(512, 64, 0, 448), &[f32s(&[512])], None, None), ["f32[rows, 512]"]);
    assert_eq!(good(fp8(160, 64, 32, 128), &[f32s(&[320])], None, None), ["f32[rows, 320]"]);
    assert_eq!(good(fp4(128, 32), &[f32s(&[4, 256])], None, None), ["f32[rows, 4, 256]"]);
    for op in [
        fp8(512, 64, 0, 450),
        fp8(512, 64, 0, 0),
        fp8(512, 0, 0, 448),
        fp8(512, 64, 128, 448),
        fp8(512, 64, usize::MAX, 64),
        fp8(0, 64, 0, 0),
        fp8(384, 64, 0, 64),
        fp4(96, 32),
        fp4(128, 0),
        fp4(128, 48),
        fp4(1024, 32),
    ] {
        let why = bad(op.clone(), &[f32s(&[512])], None, None);
        assert!(why.starts_with("f32[rows, 512] does not fit RoundTrip"), "{op:?}: {why}");
    }
    assert_eq!(bad(fp4(64, 32), &[i32s(&[64])], None, None), "input 0 is i32[rows, 64], not f32");
}
