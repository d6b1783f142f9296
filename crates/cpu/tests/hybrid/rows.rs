//! Ops that compute each row from the same row.

use minfer_format::BlockType;
use minfer_graph::{Dim, Graph, GraphBuilder, Norm, Op, Slice, Streams, ValueType};
use minfer_runtime::KvFormat;

use crate::harness::*;

/// Streams and numbers per stream.
const N: usize = 3;
const W: usize = 20;

fn graph() -> Graph {
    let mut b = GraphBuilder::new();
    let ids = per_row(&mut b, "ids");
    let pairs = b.input("pairs", ValueType::i32(Dim::Rows, [2]));
    let x = table(&mut b, ids, "x", W);
    let weights = table(&mut b, ids, "weights", N);
    let h = table(&mut b, pairs, "half", N * W / 2);
    let streams = Streams { n: N, scale: 0.25 };
    let scale = weight(&mut b, "scale", &[W]);
    let norm = weight(&mut b, "norm", &[N * W]);
    let dense = weight(&mut b, "dense", &[8, N * W]);
    let repeated = b.streams(Op::Repeat, streams, &[x], "repeated");
    let sum = b.add(h, repeated);
    // The norm of a sum is fused, and so is the norm of what is quantised elsewhere.
    let normed = b.grouped_norm(sum, norm, Norm { eps: 1e-5, group: W });
    let product = b.matmul(normed, dense, "product");
    let results = [
        ("scaled", b.scale_vec(x, scale)),
        ("sliced", b.slice(h, Slice { group: 15, from: 4, len: 3 }, "sliced")),
        ("summed", b.streams(Op::StreamSum, streams, &[h], "summed")),
        ("dots", b.streams(Op::StreamDot, streams, &[h, repeated], "dots")),
        ("products", b.streams(Op::StreamMul, streams, &[x, weights], "products")),
        ("added", b.streams(Op::StreamAdd, streams, &[h, x, weights], "added")),
        ("normed", normed),
        ("product", product),
    ];
    results.into_iter().for_each(|(name, value)| b.output(name, value));
    b.finish().unwrap()
}

/// The same in f64 for token `id` with the pair of ids `pair`.
fn reference(id: usize, pair: [usize; 2]) -> Vec<Vec<f64>> {
    let (x, weights) = (row("x", W, id), row("weights", N, id));
    let h = pair.map(|id| row("half", N * W / 2, id)).concat();
    let f = |name, count| numbers(name, count).into_iter().map(f64::from).collect::<Vec<_>>();
    let (scale, norm, dense) = (f("scale", W), f("norm", N * W), f("dense", 8 * N * W));
    let at = |i: usize| h[i] + x[i % W];
    let normed: Vec<f64> = (0..N * W)
        .map(|i| {
            let group = i / W * W..(i / W + 1) * W;
            let square = group.map(|j| at(j).powi(2)).sum::<f64>() / W as f64;
            at(i) / (square + 1e-5).sqrt() * norm[i]
        })
        .collect();
    let product = dense.chunks(N * W).map(|w| w.iter().zip(&normed).map(|(w, x)| w * x).sum());
    vec![
        x.iter().zip(&scale).map(|(x, s)| x * s).collect(),
        (0..12).map(|i| h[i / 3 * 15 + 4 + i % 3]).collect(),
        (0..W).map(|i| 0.25 * (0..N).map(|s| h[s * W + i]).sum::<f64>()).collect(),
        (0..N).map(|s| 0.25 * (0..W).map(|i| h[s * W + i] * x[i]).sum::<f64>()).collect(),
        (0..N * W).map(|i| x[i % W] * weights[i / W]).collect(),
        (0..N * W).map(|i| h[i] + x[i % W] * weights[i / W]).collect(),
        normed.clone(),
        product.collect(),
    ]
}

/// Numbers of about 1; sums of at most 60 products: bound 1e-5.
#[test]
fn rows_equal_their_formulas_on_every_machine() {
    let graph = graph();
    let ids: Vec<i32> = (0..7).map(|i| i * 13 % VOCAB as i32).collect();
    let pairs: Vec<i32> = (0..14).map(|i| i * 29 % VOCAB as i32).collect();
    let inputs: [(&str, &[i32]); 2] = [("ids", &ids), ("pairs", &pairs)];
    let plain = Session::new(&graph, PLAIN, KvFormat::F32, 1).step(&inputs).unwrap();
    let rows = ids
        .iter()
        .zip(pairs.chunks(2))
        .map(|(&id, p)| reference(id as usize, [p[0] as usize, p[1] as usize]));
    let rows: Vec<_> = rows.collect();
    for (i, got) in plain.iter().enumerate() {
        let want: Vec<f64> = rows.iter().flat_map(|row| row[i].clone()).collect();
        assert_close(got, &want, 1e-5);
    }
    for machine in machines() {
        let got = Session::new(&graph, machine, KvFormat::F32, 1).step(&inputs).unwrap();
        assert!(got == plain, "{machine:?}");
    }
}

#[test]
fn one_bad_id_of_several_is_an_error() {
    let mut session = Session::new(&graph(), PLAIN, KvFormat::F32, 1);
    for bad in [-1, VOCAB as i32] {
        let error = session.step(&[("ids", &[0]), ("pairs", &[0, bad])]).unwrap_err().to_string();
        assert!(error.contains(&bad.to_string()), "{error}");
    }
}

/// Each head's part of a row with a matrix of its own, and what a row's parts are put together from. Against f64 with
/// the decoded weights: sums of 64 products of about 1, activations rounded to 1/254 for quantised weights: 0.1.
#[test]
fn heads_have_matrices_of_their_own() {
    const HEADS: usize = 3;
    let (n, k) = (20, 64);
    for (ty, tolerance) in [
        (BlockType::BF16, 1e-4),
        (BlockType::F8_E4M3, 1e-4),
        (BlockType::Q8_0, 0.1),
        (BlockType::Q4_0, 0.1),
        (BlockType::AFFINE4, 0.1),
        (BlockType::AFFINE8, 0.1),
    ] {
        let mut b = GraphBuilder::new();
        let ids = per_row(&mut b, "ids");
        let parts = ["a", "b", "c"].map(|name| table(&mut b, ids, name, k));
        let x = b.concat(&parts, "x");
        let w = weight_of(&mut b, ty, &[HEADS, n, k]);
        let y = b.head_matmul(x, w, "y");
        b.output("x", x);
        b.output("y", y);
        let graph = b.finish().unwrap();
        let ids: Vec<i32> = (0..19).map(|i| i * 13 % VOCAB as i32).collect();
        let weights = numbers_of(ty, HEADS * n * k);
        let (mut rows, mut products) = (vec![], vec![]);
        for &id in &ids {
            for (head, name) in ["a", "b", "c"].iter().enumerate() {
                let x = row(name, k, id as usize);
                let w = &weights[head * n * k..][..n * k];
                products.extend(
                    w.chunks(k).map(|w| w.iter().zip(&x).map(|(w, x)| f64::from(*w) * x).sum::<f64>()),
                );
                rows.extend(x);
            }
        }
        let plain = Session::new(&graph, PLAIN, KvFormat::F32, 1).step(&[("ids", &ids)]).unwrap();
        assert_close(&plain[0], &rows, 0.0);
        assert_close(&plain[1], &products, tolerance);
        for machine in machines() {
            let mut session = Session::new(&graph, machine, KvFormat::F32, 1);
            assert!(session.step(&[("ids", &ids)]).unwrap() == plain, "{machine:?}, {ty}");
            let alone = session.step(&[("ids", &ids[7..8])]).unwrap();
            assert!(plain[1][7 * 4 * HEADS * n..].starts_with(&alone[1]), "{machine:?}, {ty}, alone");
        }
    }
}
