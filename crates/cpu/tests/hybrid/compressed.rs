//! Compression of windows: against f64, and independent of how sequences are cut into steps.

use minfer_graph::{Compress, Graph, GraphBuilder, StateDecl, StateKind, state_from};
use minfer_runtime::KvFormat;

use crate::harness::*;

/// Numbers of a compressed row: more than one range of channels, the last not whole.
const W: usize = 150;
const SLOTS: usize = 4;
const SHAPES: [Compress; 2] = [Compress { ratio: 4, overlap: true }, Compress { ratio: 5, overlap: false }];

fn graph(c: Compress) -> Graph {
    let mut b = GraphBuilder::new();
    let [ids, positions, from, to] = ["ids", "positions", "from", "to"].map(|name| per_row(&mut b, name));
    let width = c.parts() * W;
    let kind = StateKind::Recurrent { width: c.tail() * 2 * width };
    let state = b.state(StateDecl { name: "open".to_string(), layer: 0, kind });
    let (kv, gate) = (table(&mut b, ids, "kv", width), table(&mut b, ids, "gate", width));
    let bias = weight(&mut b, "bias", &[c.ratio, width]);
    let out = b.compress([kv, gate, positions], [from, to], bias, state, c);
    b.output("out", out);
    b.finish().unwrap()
}

/// Compressed rows where windows end, zeros elsewhere.
fn reference(c: Compress, ids: &[i32]) -> Vec<f64> {
    let width = c.parts() * W;
    let of = |name: &str, t: usize| row(name, width, ids[t] as usize);
    let bias = numbers("bias", c.ratio * width);
    let mut out = Vec::new();
    for end in 1..=ids.len() {
        if !end.is_multiple_of(c.ratio) {
            out.extend([0.0; W]);
            continue;
        }
        let start = end - c.ratio;
        let before = if c.overlap { start.saturating_sub(c.ratio)..start } else { 0..0 };
        let own = (start..end).map(|t| (t, (c.parts() - 1) * W));
        let rows: Vec<_> =
            before.map(|t| (t, 0)).chain(own).map(|(t, at)| (t, at, of("kv", t), of("gate", t))).collect();
        for i in 0..W {
            let weight = |t: usize, at: usize, gate: &[f64]| {
                (gate[at + i] + f64::from(bias[t % c.ratio * width + at + i])).exp()
            };
            let sum: f64 = rows.iter().map(|(t, at, _, gate)| weight(*t, *at, gate)).sum();
            out.push(
                rows.iter().map(|(t, at, kv, gate)| weight(*t, *at, gate) * kv[at + i]).sum::<f64>() / sum,
            );
        }
    }
    out
}

/// Rows of a sequence in one step: `from` before the first, `to` after the last.
fn step(session: &mut Session, ids: &[i32], first: usize, from: i32, to: i32) -> Vec<u8> {
    let positions: Vec<i32> = (first as i32..(first + ids.len()) as i32).collect();
    let (mut froms, mut tos) = (vec![state_from::PREVIOUS_ROW; ids.len()], vec![-1; ids.len()]);
    froms[0] = from;
    tos[ids.len() - 1] = to;
    let inputs = [("ids", ids), ("positions", &positions), ("from", &froms), ("to", &tos)];
    session.step(&inputs).unwrap().remove(0)
}

fn ids(count: usize) -> Vec<i32> {
    (0..count as i32).map(|i| i * 37 % VOCAB as i32).collect()
}

/// Means of numbers up to 1 with weights of sum 1: bound 2e-6. Chunks down to rows alone, through slots that hold
/// other states' leftovers, give the bits of one step.
#[test]
fn windows_are_compressed_however_a_sequence_is_cut() {
    for c in SHAPES {
        let (graph, ids) = (graph(c), ids(41));
        let fresh = |machine| Session::new(&graph, machine, KvFormat::F32, SLOTS);
        let whole = step(&mut fresh(PLAIN), &ids, 0, state_from::ZERO, -1);
        assert_close(&whole, &reference(c, &ids), 2e-6);
        for machine in machines() {
            for (chunk, slots) in [(41, [0, 1]), (1, [2, 2]), (2, [0, 3]), (7, [1, 1]), (9, [3, 1])] {
                let mut session = fresh(machine);
                for (i, slot) in slots.into_iter().enumerate() {
                    step(&mut session, &ids[10 * i..10 * i + 19], 0, state_from::ZERO, slot);
                }
                let mut got = Vec::new();
                for (i, part) in ids.chunks(chunk).enumerate() {
                    let from = if i == 0 { state_from::ZERO } else { slots[(i + 1) % 2] };
                    got.extend(step(&mut session, part, i * chunk, from, slots[i % 2]));
                }
                assert!(got == whole, "{c:?}, {machine:?}, chunks of {chunk}");
            }
        }
    }
}

#[test]
fn positions_that_do_not_follow_each_other_are_refused() {
    let graph = graph(SHAPES[0]);
    for positions in [[0, 2], [-1, 0], [3, 3], [i32::MAX, i32::MIN]] {
        let mut session = Session::new(&graph, PLAIN, KvFormat::F32, SLOTS);
        let inputs = [
            ("ids", &[1, 2][..]),
            ("positions", &positions),
            ("from", &[state_from::ZERO, -1]),
            ("to", &[-1, 0]),
        ];
        let error = format!("{:?}", session.step(&inputs).unwrap_err());
        assert!(error.contains("do not follow each other"), "{positions:?}: {error}");
    }
}
