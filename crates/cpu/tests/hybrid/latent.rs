//! Latent attention as one layer: one latent per position for all heads, index keys pooled by gates, weighted heads of
//! the indexer, matrices per head around the attention.

use minfer_graph::{
    Attend, AttendBlocks, Dim, Graph, GraphBuilder, IndexSelect, PagedPart, PoolGated, StateDecl, StateKind,
    ValueType,
};
use minfer_runtime::KvFormat;

use crate::harness::*;
use crate::sparse::{PAGES, append, dot, i32s, ids};

const HEADS: usize = 3;
/// Numbers per head before and after, and per latent.
const K: usize = 10;
const V: usize = 9;
const LATENT: usize = 20;
const INDEX_DIM: usize = 12;
const INDEX_HEADS: usize = 5;
const BLOCK: usize = 4;
const TOP: usize = 5;

fn graph() -> Graph {
    let mut b = GraphBuilder::new();
    let [ids, positions, slots, table_at] =
        ["ids", "positions", "slots", "table_at"].map(|name| per_row(&mut b, name));
    let pages = b.input("pages", ValueType::i32(Dim::Const(PAGES.len() + 1), []));
    let mut parts = vec![LATENT, INDEX_DIM, INDEX_DIM].into_iter().map(PagedPart::each).collect::<Vec<_>>();
    parts.push(PagedPart::each(INDEX_DIM).every(BLOCK));
    let kind = StateKind::Paged { parts };
    let state = b.state(StateDecl { name: "latent".to_string(), layer: 0, kind });
    let q = table(&mut b, ids, "q", HEADS * K);
    let into = weight(&mut b, "into", &[HEADS, LATENT, K]);
    let out_of = weight(&mut b, "out_of", &[HEADS, V, LATENT]);
    let latent = table(&mut b, ids, "latent", LATENT);
    let [key, gate] = ["key", "gate"].map(|name| table(&mut b, ids, name, INDEX_DIM));
    let index_q = table(&mut b, ids, "index_q", INDEX_HEADS * INDEX_DIM);
    let weights = table(&mut b, ids, "weights", INDEX_HEADS);
    let bias = weight(&mut b, "bias", &[BLOCK * INDEX_DIM]);
    let tables = [positions, table_at, pages];
    b.store_kv(&[latent, key, gate], slots, state);
    b.pool_gated(tables, slots, bias, state, PoolGated { block: BLOCK, raw: 1, gates: 2, pooled: 3 });
    let select =
        IndexSelect { heads: INDEX_HEADS, block: BLOCK, top: TOP, pooled: 3, scale: 0.3, weighted: true };
    let blocks = b.index_select(index_q, tables, Some(weights), state, select);
    let q = b.head_matmul(q, into, "q_latent");
    let attend = Attend { heads: HEADS, kv_heads: 1, scale: 0.5, v_part: 0 };
    let attended = b.attend_blocks(q, tables, blocks, state, AttendBlocks { attend, block: BLOCK });
    let y = b.head_matmul(attended, out_of, "y");
    b.output("blocks", blocks);
    b.output("y", y);
    b.finish().unwrap()
}

/// The pooled key of a block.
fn pooled(ids: &[i32], b: usize) -> Vec<f64> {
    let rows = |name| ids[b * BLOCK..][..BLOCK].iter().map(move |&id| row(name, INDEX_DIM, id as usize));
    let (keys, gates): (Vec<_>, Vec<_>) = (rows("key").collect(), rows("gate").collect());
    let bias = numbers("bias", BLOCK * INDEX_DIM);
    let channel = |c: usize| {
        let w = |j: usize| (gates[j][c] + f64::from(bias[j * INDEX_DIM + c])).exp();
        (0..BLOCK).map(|j| w(j) * keys[j][c]).sum::<f64>() / (0..BLOCK).map(w).sum::<f64>()
    };
    (0..INDEX_DIM).map(channel).collect()
}

/// Chosen blocks and output of the last of `ids`: keys and values are computed out of the latents here.
fn reference(ids: &[i32]) -> (Vec<i32>, Vec<f64>) {
    let id = ids[ids.len() - 1] as usize;
    let complete = ids.len() / BLOCK;
    let (q, weights) = (row("index_q", INDEX_HEADS * INDEX_DIM, id), row("weights", INDEX_HEADS, id));
    let score = |b| {
        let key = pooled(ids, b);
        q.chunks(INDEX_DIM).zip(&weights).map(|(q, w)| w * dot(q, &key).max(0.0)).sum::<f64>() * 0.3
    };
    let mut ranked: Vec<(f64, usize)> = (0..complete).map(|b| (score(b), b)).collect();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut blocks: Vec<i32> = ranked.iter().take(TOP).map(|r| r.1 as i32).collect();
    blocks.sort();
    let allowed = (0..ids.len()).filter(|p| blocks.contains(&((p / BLOCK) as i32)) || p / BLOCK >= complete);
    let latents: Vec<Vec<f64>> = allowed.map(|p| row("latent", LATENT, ids[p] as usize)).collect();
    blocks.resize(TOP, -1);
    let f64s = |name, count| numbers(name, count).into_iter().map(f64::from).collect::<Vec<_>>();
    let (into, out_of) = (f64s("into", HEADS * LATENT * K), f64s("out_of", HEADS * V * LATENT));
    let q = row("q", HEADS * K, id);
    let mut y = vec![];
    for head in 0..HEADS {
        let to_latent = &into[head * LATENT * K..][..LATENT * K];
        let key = |latent: &[f64]| -> Vec<f64> {
            (0..K).map(|i| (0..LATENT).map(|c| to_latent[c * K + i] * latent[c]).sum()).collect()
        };
        let e: Vec<f64> = latents.iter().map(|l| (0.5 * dot(&q[head * K..][..K], &key(l))).exp()).collect();
        let sum: f64 = e.iter().sum();
        let from_latent = &out_of[head * V * LATENT..][..V * LATENT];
        y.extend(
            from_latent
                .chunks(LATENT)
                .map(|w| e.iter().zip(&latents).map(|(e, latent)| e * dot(w, latent)).sum::<f64>() / sum),
        );
    }
    (blocks, y)
}

/// Blocks equal those of f64; sums of 20 numbers below 1 after scores of about 3: bound 1e-5.
#[test]
fn a_layer_equals_the_formulas() {
    let ids = ids();
    let got = append(&mut Session::new(&graph(), PLAIN, KvFormat::F32, 5), 0, &ids);
    let (blocks, width) = (i32s(&got[0]), 4 * HEADS * V);
    for position in [0, 2, 3, 4, 18, 19, 20, 23, 24, 63, 64, 100, 127, 128, 149] {
        let (want_blocks, want) = reference(&ids[..position + 1]);
        assert_eq!(blocks[position * TOP..][..TOP], want_blocks, "position {position}");
        assert_close(&got[1][position * width..][..width], &want, 1e-5);
    }
}

#[test]
fn cuts_into_steps_and_machines_do_not_show() {
    let (graph, ids) = (graph(), ids());
    for format in KvFormat::ALL {
        let whole = append(&mut Session::new(&graph, PLAIN, format, 5), 0, &ids);
        for machine in machines() {
            for chunk in [1, 3, 64, 150] {
                let mut session = Session::new(&graph, machine, format, 5);
                let parts: Vec<_> = ids
                    .chunks(chunk)
                    .enumerate()
                    .map(|(i, ids)| append(&mut session, i * chunk, ids))
                    .collect();
                for (i, whole) in whole.iter().enumerate() {
                    let got: Vec<u8> = parts.iter().flat_map(|p| p[i].clone()).collect();
                    assert!(got == *whole, "{machine:?}, chunks of {chunk}, result {i}");
                }
            }
        }
    }
}
