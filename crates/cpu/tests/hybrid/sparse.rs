//! Sparse attention as one layer: store, pool, select, attend.

use minfer_graph::{
    Attend, AttendBlocks, Dim, Graph, GraphBuilder, IndexSelect, PAGE, PagedPart, PoolKeys, StateDecl,
    StateKind, ValueType,
};
use minfer_runtime::KvFormat;

use crate::harness::*;

const ATTEND: Attend = Attend { heads: 4, kv_heads: 2, scale: 0.5, v_part: 1 };
const DIM: usize = 12;
const INDEX_DIM: usize = 20;
const INDEX_HEADS: usize = 2;
const BLOCK: usize = 4;
/// The sequence's pages, of the five that there are.
pub(crate) const PAGES: [i32; 4] = [3, 0, 4, 1];
const INV_FREQ: [f32; 3] = [1.0, 0.2, 0.03];

fn graph(top: usize) -> Graph {
    let mut b = GraphBuilder::new();
    let [ids, positions, slots, table_at] =
        ["ids", "positions", "slots", "table_at"].map(|name| per_row(&mut b, name));
    let pages = b.input("pages", ValueType::i32(Dim::Const(PAGES.len() + 1), []));
    let kv = ATTEND.kv_heads * DIM;
    let mut parts = vec![kv, kv, INDEX_DIM].into_iter().map(PagedPart::each).collect::<Vec<_>>();
    parts.push(PagedPart::each(INDEX_DIM).every(BLOCK));
    let kind = StateKind::Paged { parts };
    let state = b.state(StateDecl { name: "kv".to_string(), layer: 0, kind });
    let q = table(&mut b, ids, "q", ATTEND.heads * DIM);
    let [k, v] = ["k", "v"].map(|name| table(&mut b, ids, name, kv));
    let raw = table(&mut b, ids, "raw", INDEX_DIM);
    let index_q = table(&mut b, ids, "index_q", INDEX_HEADS * INDEX_DIM);
    let norm = weight(&mut b, "norm", &[INDEX_DIM]);
    let tables = [positions, table_at, pages];
    b.store_kv(&[k, v, raw], slots, state);
    let pool = PoolKeys { block: BLOCK, raw: 2, pooled: 3, eps: 1e-6, inv_freq: INV_FREQ.into() };
    b.pool_keys(tables, slots, norm, state, pool);
    let select =
        IndexSelect { heads: INDEX_HEADS, block: BLOCK, top, pooled: 3, scale: 0.3, weighted: false };
    let blocks = b.index_select(index_q, tables, None, state, select);
    let sparse = AttendBlocks { attend: ATTEND, block: BLOCK };
    let attended = b.attend_blocks(q, tables, blocks, state, sparse);
    let dense = b.attend(q, tables, state, ATTEND);
    b.output("blocks", blocks);
    b.output("attended", attended);
    b.output("dense", dense);
    b.finish().unwrap()
}

/// Appends `ids` at position `past`. The page list starts at 1 in its table.
pub(crate) fn append(session: &mut Session, past: usize, ids: &[i32]) -> Vec<Vec<u8>> {
    let positions: Vec<i32> = (past..past + ids.len()).map(|p| p as i32).collect();
    let slots: Vec<i32> =
        positions.iter().map(|&p| PAGES[p as usize / PAGE] * PAGE as i32 + p % PAGE as i32).collect();
    let pages = [&[2][..], &PAGES].concat();
    let inputs: [(&str, &[i32]); 5] = [
        ("ids", ids),
        ("positions", &positions),
        ("slots", &slots),
        ("table_at", &vec![1; ids.len()]),
        ("pages", &pages),
    ];
    session.step(&inputs).unwrap()
}

pub(crate) fn ids() -> Vec<i32> {
    (0..150).map(|i| i * 37 % VOCAB as i32).collect()
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The pooled key of a block, in f64.
fn pooled(ids: &[i32], b: usize) -> Vec<f64> {
    let rows: Vec<_> =
        ids[b * BLOCK..][..BLOCK].iter().map(|&id| row("raw", INDEX_DIM, id as usize)).collect();
    let mean: Vec<f64> =
        (0..INDEX_DIM).map(|i| rows.iter().map(|r| r[i]).sum::<f64>() / BLOCK as f64).collect();
    let r = 1.0 / (dot(&mean, &mean) / INDEX_DIM as f64 + 1e-6).sqrt();
    let norm = numbers("norm", INDEX_DIM);
    let mut key: Vec<f64> = mean.iter().zip(norm).map(|(x, w)| x * r * f64::from(w)).collect();
    for (i, f) in INV_FREQ.iter().enumerate() {
        let (sin, cos) = f64::from((b * BLOCK) as f32 * f).sin_cos();
        let (x, y) = (key[i], key[i + 3]);
        (key[i], key[i + 3]) = (x * cos - y * sin, y * cos + x * sin);
    }
    key
}

/// Chosen blocks and attention of the last of `ids`, in f64.
fn reference(ids: &[i32], top: usize) -> (Vec<i32>, Vec<f64>) {
    let id = ids[ids.len() - 1] as usize;
    let complete = ids.len() / BLOCK;
    let q = row("index_q", INDEX_HEADS * INDEX_DIM, id);
    let score = |b| {
        let key = pooled(ids, b);
        q.chunks(INDEX_DIM).map(|q| dot(q, &key).max(0.0)).sum::<f64>() * 0.3
    };
    let mut ranked: Vec<(f64, usize)> = (0..complete).map(|b| (score(b), b)).collect();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut blocks: Vec<i32> = ranked.iter().take(top).map(|r| r.1 as i32).collect();
    blocks.sort();
    let allowed: Vec<usize> =
        (0..ids.len()).filter(|p| blocks.contains(&((p / BLOCK) as i32)) || p / BLOCK >= complete).collect();
    blocks.resize(top, -1);
    let (q, kv) = (row("q", ATTEND.heads * DIM, id), ATTEND.kv_heads * DIM);
    let mut out = vec![];
    for head in 0..ATTEND.heads {
        let part = head / 2 * DIM..(head / 2 + 1) * DIM;
        let of = |name, p: usize| row(name, kv, ids[p] as usize)[part.clone()].to_vec();
        let e: Vec<f64> =
            allowed.iter().map(|&p| (dot(&q[head * DIM..][..DIM], &of("k", p)) * 0.5).exp()).collect();
        let values: Vec<_> = allowed.iter().map(|&p| of("v", p)).collect();
        let sum: f64 = e.iter().sum();
        out.extend((0..DIM).map(|d| e.iter().zip(&values).map(|(e, v)| e * v[d]).sum::<f64>() / sum));
    }
    (blocks, out)
}

pub(crate) fn i32s(bytes: &[u8]) -> Vec<i32> {
    bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect()
}

/// Blocks equal those of f64; attention is a mean of |v| <= 1: bound 2e-6.
#[test]
fn a_layer_equals_the_formulas() {
    let (top, ids) = (5, ids());
    let got = append(&mut Session::new(&graph(top), PLAIN, KvFormat::F32, 5), 0, &ids);
    let (blocks, width) = (i32s(&got[0]), 4 * ATTEND.heads * DIM);
    for position in [0, 2, 3, 4, 18, 19, 20, 23, 24, 63, 64, 100, 127, 128, 149] {
        let (want_blocks, want) = reference(&ids[..position + 1], top);
        assert_eq!(blocks[position * top..][..top], want_blocks, "position {position}");
        assert_close(&got[1][position * width..][..width], &want, 2e-6);
    }
}

#[test]
fn cuts_into_steps_and_machines_do_not_show() {
    let (graph, ids) = (graph(5), ids());
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

#[test]
fn room_for_every_block_is_dense_attention() {
    for format in KvFormat::ALL {
        let got = append(&mut Session::new(&graph(40), (minfer_cpu::Isa::detect(), 2), format, 5), 0, &ids());
        assert!(got[1] == got[2]);
        assert!(floats(&got[1]).iter().all(|x| x.is_finite()));
    }
}

/// A copied page carries every part: the copy, in another place, continues with the same bits.
#[test]
fn a_copied_page_has_every_part() {
    let (graph, ids) = (graph(5), ids());
    let whole = append(&mut Session::new(&graph, PLAIN, KvFormat::F16, 5), 0, &ids[..61]);
    let mut session = Session::new(&graph, PLAIN, KvFormat::F16, 5);
    append(&mut session, 0, &ids[..60]);
    session.0.state(minfer_graph::StateId(0)).unwrap().copy_page(3, 2).unwrap();
    let inputs: [(&str, &[i32]); 5] = [
        ("ids", &ids[60..61]),
        ("positions", &[60]),
        ("slots", &[2 * PAGE as i32 + 60]),
        ("table_at", &[4]),
        ("pages", &[0, 0, 0, 0, 2]),
    ];
    let got = session.step(&inputs).unwrap();
    got.iter().zip(&whole).for_each(|(got, whole)| assert!(whole.ends_with(got)));
}

#[test]
fn tables_that_do_not_fit_are_errors() {
    let mut session = Session::new(&graph(5), (minfer_cpu::Isa::detect(), 2), KvFormat::F32, 5);
    let slots = 5 * PAGE as i32;
    for (position, slot, table_at, page) in [
        (-1, 0, 0, 0),
        (i32::MAX, 0, 0, 0),
        (320, 0, 0, 0),
        (70, 0, 4, 0),
        (3, slots, 0, 0),
        (3, 3, -1, 0),
        (3, 3, 5, 0),
        (3, 3, 0, -1),
        (3, 3, 0, 5),
    ] {
        let inputs: [(&str, &[i32]); 5] = [
            ("ids", &[1]),
            ("positions", &[position]),
            ("slots", &[slot]),
            ("table_at", &[table_at]),
            ("pages", &[page; 5]),
        ];
        let error = session.step(&inputs).unwrap_err().to_string();
        assert!(error.contains("page list") || error.contains("slot"), "{position} {slot}: {error}");
    }
    append(&mut session, 0, &ids());
}
