//! Shapes of the hybrid families: their sizes against what is published, and against counts by hand.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use minfer_format::BlockType;
use minfer_graph::{Graph, PagedPart, StateKind, WeightDecl};
use minfer_model::{Checkpoint, DraftHead, Model, SHAPES, Shape, load};

fn shape(text: &str) -> (Checkpoint, Box<dyn Model>) {
    let ck = Checkpoint::Shape(Shape::parse(text).unwrap());
    let model = load(&ck).unwrap();
    (ck, model)
}

fn graph(text: &str) -> Graph {
    let (ck, model) = shape(text);
    model.graph(&ck, 16).unwrap()
}

fn parameters<'a>(weights: impl IntoIterator<Item = &'a WeightDecl>) -> u64 {
    weights.into_iter().map(|w| w.shape.iter().product::<usize>() as u64).sum()
}

/// Billions of parameters, without the table of n-grams, with the draft head where the published total has it.
fn billions(text: &str, with_head: bool) -> f64 {
    let (ck, model) = shape(text);
    let graph = model.graph(&ck, 1).unwrap();
    let mut total = parameters(&graph.weights);
    let Some(DraftHead::Chain(head)) = model.draft_head(&ck, 1).unwrap() else { panic!("{text} has a head") };
    if with_head {
        total += parameters(head.weights.iter().filter(|w| !graph.weights.contains(w)));
    }
    total as f64 / 1e9
}

/// Published totals are rounded to whole billions, so half a billion is what can be asked for; GLM's "320B" is with its
/// draft head (7.4 B) and came out a little lower than it is, and Qwen's "125B" is without the table and a round number.
#[test]
fn totals_are_the_published_ones() {
    for (name, published, tolerance) in
        [("deepseek-v4-flash", 284.0, 0.5), ("glm-5.3-flash", 320.0, 1.0), ("qwen3.8-flash-next", 125.0, 1.0)]
    {
        let counted = billions(&format!("{name}:q4_k_m"), name.starts_with("glm"));
        assert!((counted - published).abs() <= tolerance, "{name}: {counted} B, published {published} B");
    }
    // 16 heads, each a prime of rows above 20 million, padded to a multiple of 128; 160 numbers a row.
    let (ck, model) = shape("qwen3.8-flash-next:q8_0");
    let table = model.ngram_table(&ck).unwrap().unwrap();
    assert_eq!((&table.shape[..], table.ty), (&[320_001_536, 160][..], BlockType::Q8_0));
    assert_eq!(model.ngram().unwrap().heads(), 16);
    assert!(
        graph("qwen3.8-flash-next:q8_0").weights.iter().all(|w| w.name != table.name),
        "it stays on disk"
    );
}

/// Numbers per 128 tokens in all paged states, in all windows, and per sequence in all recurrent states.
fn state(graph: &Graph) -> [usize; 3] {
    graph.states.iter().fold([0; 3], |[paged, windows, recurrent], s| match &s.kind {
        StateKind::Paged { parts } => {
            let (last, all): (Vec<PagedPart>, Vec<PagedPart>) =
                parts.iter().partition(|p| p.window.is_some());
            let all: usize = all.iter().map(|p| p.width * 128 / p.every).sum();
            let last: usize = last.iter().map(|p| p.width * p.window.unwrap()).sum();
            [paged + all, windows + last, recurrent]
        }
        StateKind::Recurrent { width } => [paged, windows, recurrent + width],
        other => panic!("{other:?}"),
    })
}

#[test]
fn state_counted_by_hand() {
    // 12 layers of keys and values of 2 heads of 256, a pooled index key of 128 for each 4 tokens, and raw ones of the
    // last 4. 36 layers of 3 columns of 10240 channels and 48 matrices of 128 x 128; 9 rows of 4 streams for the n-grams.
    let recurrent = 36 * (3 * 10240 + 48 * 128 * 128) + 9 * 4 * 2560;
    let qwen = [12 * (128 * 2 * 2 * 256 + 32 * 128), 12 * 4 * 128, recurrent];
    assert_eq!(state(&graph("qwen3.8-flash-next:bf16")), qwen);
    // 11 layers of a latent of 512, for each 4 a pooled index key of 128, and of the last 4 raw keys and gates. 34 layers
    // of 3 columns of queries, keys and values of 64 heads of 128, and 64 matrices of 128 x 128.
    let recurrent = 34 * (3 * 3 * 8192 + 64 * 128 * 128);
    let glm = [11 * (128 * 512 + 32 * 128), 11 * 4 * 2 * 128, recurrent];
    assert_eq!(state(&graph("glm-5.3-flash:bf16")), glm);
    // 43 layers of the last 128 rows of 512; in 21 and 20 a compressed row for each 4 and 128 tokens, in the 21 an index
    // key of 128 too. Of open windows keys and gates: 7 rows of twice 512 and of twice 128, 127 rows of 512.
    let paged = 21 * 32 * (512 + 128) + 20 * 512;
    let open = 21 * 7 * 2 * (2 * 512 + 2 * 128) + 20 * 127 * 2 * 512;
    assert_eq!(state(&graph("deepseek-v4-flash:bf16")), [paged, 43 * 128 * 512, open]);
}

/// Nothing of the size of a model is touched: every preset, with every type, has its graph in less than 2 s, which is
/// long for what takes 20 ms. Names are those of GGUF files, and every weight has whole blocks.
#[test]
fn every_shape_builds_at_once() {
    for preset in &SHAPES {
        let types = BlockType::all().map(|ty| ty.name().to_string()).chain(["q4_k_m".to_string()]);
        for ty in types {
            let text = format!("{}:{ty}", preset.name);
            let started = Instant::now();
            let graph = graph(&text);
            assert!(started.elapsed() < Duration::from_secs(2), "{text}: {:?}", started.elapsed());
            for w in &graph.weights {
                let known = ["blk.", "token_embd.", "output"].iter().any(|stem| w.name.starts_with(stem));
                assert!(known, "{text}: {}", w.name);
                assert!(w.bytes().is_some(), "{text}: {} is {} {:?}", w.name, w.ty, w.shape);
            }
        }
    }
}

#[test]
fn types_as_llama_cpp_gives_them() {
    let ty = |text: &str, name: &str| {
        let (ck, model) = shape(text);
        let graph = model.graph(&ck, 1).unwrap();
        let table = model.ngram_table(&ck).unwrap();
        graph.weights.iter().chain(&table).find(|w| w.name == name).unwrap().ty
    };
    for (text, name, want) in [
        // Rows of 640 are not whole blocks of 256.
        ("qwen3.8-flash-next:q4_k_m", "blk.9.ffn_down_exps.weight", BlockType::Q5_0),
        ("qwen3.8-flash-next:q4_k_m", "blk.9.ffn_gate_exps.weight", BlockType::Q4_K),
        ("qwen3.8-flash-next:q4_k_m", "per_layer_token_embd.weight", BlockType::Q5_0),
        ("qwen3.8-flash-next:q6_k", "blk.9.ffn_down_exps.weight", BlockType::Q8_0),
        ("qwen3.8-flash-next:q4_k_m", "blk.0.ssm_conv1d.weight", BlockType::F32),
        ("qwen3.8-flash-next:q4_k_m", "blk.0.ffn_gate_inp.weight", BlockType::F32),
        ("glm-5.3-flash:q4_k_m", "blk.3.attn_q_b.weight", BlockType::Q8_0),
        ("glm-5.3-flash:q4_k_m", "blk.3.attn_v_b.weight", BlockType::BF16),
        ("glm-5.3-flash:q4_k_m", "blk.3.indexer.proj.weight", BlockType::BF16),
        ("glm-5.3-flash:f16", "blk.3.attn_v_b.weight", BlockType::F16),
        ("deepseek-v4-flash:mxfp4", "blk.0.hc_attn_fn.weight", BlockType::F32),
        ("deepseek-v4-flash:mxfp4", "blk.2.attn_compressor_ape.weight", BlockType::F32),
        ("deepseek-v4-flash:mxfp4", "blk.2.ffn_up_exps.weight", BlockType::MXFP4),
        ("deepseek-v4-flash:mxfp4", "output.weight", BlockType::Q6_K),
    ] {
        assert_eq!(ty(text, name), want, "{text}: {name}");
    }
}

/// Each token's experts in hash layers are different ones.
#[test]
fn ids_of_a_shape() {
    let (ck, model) = shape("deepseek4-small:q8_0");
    let graph = model.graph(&ck, 1).unwrap();
    let table = graph.weights.iter().find(|w| w.name.contains("tid2eid")).unwrap();
    let bytes = ck.load(table).unwrap();
    let ids: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    assert_eq!(ids.len(), 8192 * 4);
    for row in ids.chunks(4) {
        assert!(row.iter().all(|id| (0.0..16.0).contains(id)), "{row:?}");
        assert!(row.windows(2).all(|w| w[0] < w[1]), "{row:?}");
    }
    assert_ne!(ids[..4], ids[4..8]);
}

/// The real table takes 51 GiB; a shape's takes no room, and its rows are zeros.
#[test]
fn table_of_a_shape() {
    let (ck, model) = shape("qwen3.8-flash-next:q8_0");
    let decl = model.ngram_table(&ck).unwrap().unwrap();
    let table = ck.row_table(&decl, Default::default()).unwrap();
    assert_eq!((table.rows(), table.width()), (320_001_536, 160));
    let mut numbers = vec![];
    table.read(&[0, 320_001_535, 7], &mut numbers).unwrap();
    assert_eq!(numbers, vec![0.0; 3 * 160]);
    assert!(table.read(&[320_001_536], &mut numbers).is_err());
}
