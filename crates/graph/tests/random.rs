//! Random graphs from the builder: they validate, and fuse to graphs that validate.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{i32s, weight};
use minfer_format::BlockType::{F32, Q4_0};
use minfer_graph::{Graph, GraphBuilder, fuse};
use proptest::prelude::*;

/// Each entry is an operation and the values that it reads, as positions in the list so far.
fn build(recipe: &[(u8, u8, u8)], results: &[u8]) -> Graph {
    let mut b = GraphBuilder::new();
    let ids = b.input("ids", i32s(&[]));
    let table = weight(&mut b, "table", F32, &[16, 32]);
    let norm = weight(&mut b, "norm", F32, &[32]);
    let bias = weight(&mut b, "bias", F32, &[32]);
    let matrices = [weight(&mut b, "plain", F32, &[32, 32]), weight(&mut b, "packed", Q4_0, &[32, 32])];
    let mut pool = vec![b.embed(ids, table)];
    for (i, &(op, x, y)) in recipe.iter().enumerate() {
        b.set_layer(Some(i as u32 / 3));
        let pick = |at: u8| pool[pool.len() - 1 - (at as usize % 4).min(pool.len() - 1)];
        let (x, y) = (pick(x), pick(y));
        let made = match op {
            0 | 1 => b.add(x, y),
            2 | 3 => b.mul(x, y),
            4 | 5 => b.silu(x),
            6 | 7 => b.rms_norm(x, norm, 1e-5),
            8 => b.bias_add(x, bias),
            _ => b.matmul(x, matrices[usize::from(y.0 % 2 == 0)], "product"),
        };
        pool.push(made);
    }
    for (name, at) in ["first", "second", "third"].into_iter().zip(results) {
        b.output(name, pool[*at as usize % pool.len()]);
    }
    b.finish().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_built_graph_validates_and_fuses_to_one_that_does(
        recipe in proptest::collection::vec((0u8..12, any::<u8>(), any::<u8>()), 0..24),
        results in proptest::collection::vec(any::<u8>(), 1..4),
        refuse in any::<u32>(),
    ) {
        let graph = build(&recipe, &results);
        prop_assert_eq!(graph.validate(), Ok(()));
        let asked = std::cell::Cell::new(0u32);
        let takes = |_: &Graph, _: [&minfer_graph::Node; 2], _: &minfer_graph::Node| {
            asked.set(asked.get() + 1);
            refuse >> (asked.get() % 32) & 1 == 0
        };
        let fused = fuse(graph.clone(), &takes);
        prop_assert_eq!(fused.validate(), Ok(()), "{:?}", fused.nodes);
        prop_assert_eq!(&fused.values, &graph.values, "values keep their ids");
        prop_assert_eq!(&fused.outputs, &graph.outputs);
        prop_assert!(fused.nodes.len() <= graph.nodes.len());
        // A fusion hides only values that no other node reads and that are no results.
        let readers = graph.readers();
        let defined = |g: &Graph| g.nodes.iter().flat_map(|n| n.outputs.clone()).collect::<Vec<_>>();
        let kept = defined(&fused);
        for v in defined(&graph).into_iter().filter(|v| !kept.contains(v)) {
            prop_assert!(readers[v.index()].len() == 1 && !graph.is_output(v));
        }
        let untouched = fuse(graph.clone(), &|_, _, _| false);
        prop_assert!(untouched == graph, "nothing is fused that nobody takes");
    }
}
