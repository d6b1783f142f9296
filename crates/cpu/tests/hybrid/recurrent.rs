//! Convolution and delta rule: against f64, and independent of how sequences are cut into steps.

use minfer_graph::{Act, ActKind, Conv1d, DeltaRule, Graph, GraphBuilder, StateDecl, StateKind, state_from};
use minfer_runtime::KvFormat;

use crate::harness::*;

/// More than one range of channels, heads of more than one range of columns that do
/// not fill registers.
const RULE: DeltaRule =
    DeltaRule { k_heads: 2, v_heads: 4, k_dim: 12, v_dim: 45, tiled: false, per_channel: false };
const CONV: Conv1d = Conv1d { kernel: 4, dilation: 3 };
const SLOTS: usize = 4;

fn graph(rule: DeltaRule) -> Graph {
    let mut b = GraphBuilder::new();
    let [ids, from, to] = ["ids", "from", "to"].map(|name| per_row(&mut b, name));
    let width = rule.input_width();
    let mut state = |name: &str, width| {
        b.state(StateDecl { name: name.to_string(), layer: 0, kind: StateKind::Recurrent { width } })
    };
    let tail = state("tail", CONV.tail() * width);
    let matrix = state("matrix", rule.v_heads * rule.k_dim * rule.v_dim);
    let x = table(&mut b, ids, "x", width);
    let (g, beta) = (table(&mut b, ids, "g", rule.decays()), table(&mut b, ids, "beta", rule.v_heads));
    let g = b.act(g, Act { kind: ActKind::Softplus, pre: 1.0, post: -0.5 });
    let beta = b.act(beta, Act { kind: ActKind::Sigmoid, pre: 1.0, post: 1.0 });
    let w = weight(&mut b, "w", &[width, CONV.kernel]);
    let conv = b.conv1d(x, [from, to], w, tail, CONV);
    let out = b.delta_rule([conv, g, beta], [from, to], matrix, rule);
    b.output("conv", conv);
    b.output("out", out);
    b.finish().unwrap()
}

/// Convolved rows and outputs of one sequence in f64.
fn reference(rule: DeltaRule, ids: &[i32]) -> [Vec<f64>; 2] {
    let width = rule.input_width();
    let x: Vec<Vec<f64>> = ids.iter().map(|&id| row("x", width, id as usize)).collect();
    let w = numbers("w", width * CONV.kernel);
    let (mut convolved, mut out) = (vec![], vec![]);
    let mut s = vec![vec![0.0; rule.k_dim * rule.v_dim]; rule.v_heads];
    for (t, &id) in ids.iter().enumerate() {
        let sum = |c: usize| -> f64 {
            let taps = (0..CONV.kernel).filter_map(|j| {
                let t = t.checked_sub((CONV.kernel - 1 - j) * CONV.dilation)?;
                Some(x[t][c] * f64::from(w[c * CONV.kernel + j]))
            });
            taps.sum()
        };
        let y: Vec<f64> = (0..width).map(sum).map(|y| y / (1.0 + (-y).exp())).collect();
        let (g, beta) = (row("g", rule.decays(), id as usize), row("beta", rule.v_heads, id as usize));
        let unit = |from: usize| {
            let x = &y[from..from + rule.k_dim];
            let r = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            x.iter().map(|x| x * r).collect::<Vec<_>>()
        };
        for (head, s) in s.iter_mut().enumerate() {
            let k_head = if rule.tiled { head % rule.k_heads } else { head / (rule.v_heads / rule.k_heads) };
            let (q, k) = (unit(k_head * rule.k_dim), unit((rule.k_heads + k_head) * rule.k_dim));
            let v = &y[2 * rule.k_heads * rule.k_dim + head * rule.v_dim..][..rule.v_dim];
            let beta = 1.0 / (1.0 + (-beta[head]).exp());
            for (i, row) in s.chunks_mut(rule.v_dim).enumerate() {
                let g = g[if rule.per_channel { head * rule.k_dim + i } else { head }];
                row.iter_mut().for_each(|s| *s *= (-0.5 * g.exp().ln_1p()).exp());
            }
            for e in 0..rule.v_dim {
                let m: f64 = (0..rule.k_dim).map(|i| k[i] * s[i * rule.v_dim + e]).sum();
                (0..rule.k_dim).for_each(|i| s[i * rule.v_dim + e] += k[i] * beta * (v[e] - m));
                let o: f64 = (0..rule.k_dim).map(|i| q[i] * s[i * rule.v_dim + e]).sum();
                out.push(o / (rule.k_dim as f64).sqrt());
            }
        }
        convolved.extend(y);
    }
    [convolved, out]
}

/// Rows of a sequence in one step: `from` before the first, `to` after the last.
fn rows(ids: &[i32], from: i32, to: i32) -> [Vec<i32>; 3] {
    let mut froms = vec![state_from::PREVIOUS_ROW; ids.len()];
    let mut tos = vec![-1; ids.len()];
    froms[0] = from;
    tos[ids.len() - 1] = to;
    [ids.to_vec(), froms, tos]
}

fn step(session: &mut Session, [ids, from, to]: [Vec<i32>; 3]) -> Vec<Vec<u8>> {
    session.step(&[("ids", &ids), ("from", &from), ("to", &to)]).unwrap()
}

fn concat(parts: Vec<Vec<Vec<u8>>>) -> Vec<Vec<u8>> {
    (0..parts[0].len()).map(|i| parts.iter().flat_map(|p| p[i].clone()).collect()).collect()
}

fn ids(count: usize) -> Vec<i32> {
    (0..count as i32).map(|i| i * 37 % VOCAB as i32).collect()
}

/// 40 tokens with values of about 1 and states that decay: bound 1e-5.
#[test]
fn a_sequence_equals_the_formulas_on_every_machine() {
    for (tiled, per_channel) in [(false, false), (true, false), (false, true)] {
        let rule = DeltaRule { tiled, per_channel, ..RULE };
        let (graph, ids) = (graph(rule), ids(40));
        let run = |machine| {
            let mut session = Session::new(&graph, machine, KvFormat::F32, SLOTS);
            step(&mut session, rows(&ids, state_from::ZERO, -1))
        };
        let plain = run(PLAIN);
        for (got, want) in plain.iter().zip(reference(rule, &ids)) {
            assert_close(got, &want, 1e-5);
        }
        machines().into_iter().for_each(|m| assert!(run(m) == plain, "{m:?}"));
    }
}

/// Chunks through one slot (read and written by the same step) and through alternating slots, down to rows
/// alone: the bits of one pass.
#[test]
fn cuts_into_steps_do_not_show() {
    for per_channel in [false, true] {
        cuts(&graph(DeltaRule { per_channel, ..RULE }));
    }
}

fn cuts(graph: &Graph) {
    let ids = ids(40);
    let whole = step(&mut Session::new(graph, PLAIN, KvFormat::F32, SLOTS), rows(&ids, state_from::ZERO, -1));
    for machine in machines() {
        for (chunk, slots) in [(1, [2, 2]), (1, [0, 3]), (2, [0, 3]), (7, [1, 1]), (9, [3, 1]), (39, [0, 0])]
        {
            let mut session = Session::new(graph, machine, KvFormat::F32, SLOTS);
            let parts = ids.chunks(chunk).enumerate().map(|(i, ids)| {
                let from = if i == 0 { state_from::ZERO } else { slots[(i + 1) % 2] };
                step(&mut session, rows(ids, from, slots[i % 2]))
            });
            assert!(concat(parts.collect()) == whole, "{machine:?}, chunks of {chunk}");
        }
    }
}

/// Two sequences in one step, each keeping the state after every row; then a return to an earlier state.
#[test]
fn company_does_not_show_and_kept_states_are_exact() {
    let graph = graph(RULE);
    let (a, b) = (ids(6), ids(40)[20..29].to_vec());
    let fresh = || Session::new(&graph, PLAIN, KvFormat::F32, 16);
    let alone = |ids: &[i32]| step(&mut fresh(), rows(ids, state_from::ZERO, -1));
    for machine in machines() {
        let mut session = Session::new(&graph, machine, KvFormat::F32, 16);
        let both: Vec<Vec<i32>> = (0..3)
            .map(|i| {
                let [a, b] = [rows(&a, state_from::ZERO, -1), rows(&b, state_from::ZERO, -1)];
                [a[i].clone(), b[i].clone()].concat()
            })
            .collect();
        let every: Vec<i32> = (0..15).collect();
        let got = step(&mut session, [both[0].clone(), both[1].clone(), every]);
        assert!(got == concat(vec![alone(&a), alone(&b)]), "{machine:?}");
        // Slot `6 + i` is the state after row `i` of `b`.
        for kept in 0..8 {
            let late = step(&mut session, rows(&b[kept + 1..], 6 + kept as i32, -1));
            let whole = alone(&b);
            for (late, whole) in late.iter().zip(&whole) {
                assert!(whole.ends_with(late), "{machine:?}, after row {kept}");
            }
        }
    }
}

#[test]
fn states_that_are_not_there_are_errors() {
    let mut session = Session::new(&graph(RULE), (minfer_cpu::Isa::detect(), 3), KvFormat::F32, SLOTS);
    let slots = SLOTS as i32;
    for (from, to) in [(slots, -1), (i32::MAX, 0), (-3, 0), (-2, slots), (-2, i32::MAX), (-1, 0)] {
        let result = session.step(&[("ids", &[1]), ("from", &[from]), ("to", &[to])]);
        let error = result.unwrap_err().to_string();
        assert!(error.contains("row 0"), "{from} {to}: {error}");
    }
    let state = session.0.state(minfer_graph::StateId(0)).unwrap();
    assert!(state.copy_page(0, 1).is_err());
    // The session is usable after errors.
    step(&mut session, rows(&ids(5), state_from::ZERO, 0));
}
