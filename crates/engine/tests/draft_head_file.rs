//! Draft heads in files of their own (`Checkpoint::open_with_head`): the same weights as in a directory that has both, and
//! one clear error for a file that is no head of the model.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::quantised::{Layout, Source, copies};
use common::{data, with_head};
use minfer_engine::Checkpoint;
use minfer_format::BlockType;
use minfer_graph::{Graph, WeightDecl};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

const HEADS: [(&str, &str); 4] = [
    ("qwen4_exp", "mtp_hf.safetensors"),
    ("glm5_next", "mtp.safetensors"),
    ("deepseek_v4", "mtp_legacy.safetensors"),
    ("deepseek_v4", "dspark.safetensors"),
];

/// A directory without the head, and the configuration that the head needs.
fn trunk(dir: &Path, family: &str, head: &str) {
    let both = tempfile::tempdir().unwrap();
    with_head(both.path(), family, head);
    std::fs::copy(both.path().join("config.json"), dir.join("config.json")).unwrap();
    let weights = data(&format!("oracle/{family}/model.safetensors"));
    std::fs::copy(weights, dir.join("model.safetensors")).unwrap();
}

/// Name, type, shape and bytes of every weight that a graph with the head reads.
fn weights(model: &Checkpoint) -> BTreeMap<String, (BlockType, Vec<usize>, Vec<u8>)> {
    let loaded = minfer_model::load(model).unwrap();
    let head = loaded.draft_head(model, 4).unwrap().expect("a draft head");
    let trunk: Graph = loaded.graph_with_streams(model, 4).unwrap();
    let of = |w: &WeightDecl| (w.name.clone(), (w.ty, w.shape.clone(), model.load(w).unwrap().to_vec()));
    trunk.weights.iter().chain(head.weights()).map(of).collect()
}

/// Every kind of head. Reference: a directory with both in one index; the fingerprint is the same too, so that a snapshot
/// made with one opens with the other.
#[test]
fn the_same_as_in_one_directory() {
    for (family, head) in HEADS {
        let (both, alone) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        with_head(both.path(), family, head);
        trunk(alone.path(), family, head);
        let file = data(&format!("oracle/{family}/{head}"));
        let (both, apart) = (
            Checkpoint::open(both.path()).unwrap(),
            Checkpoint::open_with_head(alone.path(), &file).unwrap(),
        );
        let want = weights(&both);
        assert_eq!(weights(&apart), want, "{family} with {head}");
        assert_eq!(apart.fingerprint().unwrap(), both.fingerprint().unwrap(), "{family} with {head}");
        let without = Checkpoint::open(alone.path()).unwrap();
        let none = minfer_model::load(&without).unwrap().draft_head(&without, 4).unwrap();
        assert!(none.is_none(), "{family} alone has no head");
    }
}

/// Copies a safetensors file, changing names and dtypes.
fn rewrite(from: &Path, to: &Path, change: impl Fn(&str, &[u8]) -> Option<(String, Dtype, Vec<u8>)>) {
    let bytes = std::fs::read(from).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let changed = file.tensors().into_iter().filter_map(|(name, t)| {
        change(&name, t.data()).map(|(name, dtype, data)| (name, dtype, t.shape().to_vec(), data))
    });
    let changed: Vec<_> = changed.collect();
    let views =
        changed.iter().map(|(n, d, shape, data)| (n, TensorView::new(*d, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, to).unwrap();
}

/// F32 numbers cut to BF16.
fn cut(data: &[u8]) -> Vec<u8> {
    data.as_chunks::<4>().0.iter().flat_map(|b| [b[2], b[3]]).collect()
}

/// The head's file may have other types than the model's.
#[test]
fn a_head_in_bf16() {
    let (dir, family, head) = (tempfile::tempdir().unwrap(), "glm5_next", "mtp.safetensors");
    trunk(dir.path(), family, head);
    let file = dir.path().join("head.safetensors");
    rewrite(&data(&format!("oracle/{family}/{head}")), &file, |name, data| {
        Some((name.to_string(), Dtype::BF16, cut(data)))
    });
    let full = Checkpoint::open_with_head(dir.path(), &data(&format!("oracle/{family}/{head}"))).unwrap();
    let (full, got) = (weights(&full), weights(&Checkpoint::open_with_head(dir.path(), &file).unwrap()));
    let mut changed = 0;
    for (name, (ty, shape, bytes)) in &got {
        let (full_ty, full_shape, full_bytes) = &full[name];
        assert_eq!(shape, full_shape, "{name}");
        if ty != full_ty {
            assert_eq!((*ty, bytes), (BlockType::BF16, &cut(full_bytes)), "{name}");
            changed += 1;
        }
    }
    assert!(changed > 10, "{changed}");
}

/// FP8 with its scales, as in shards: the weights are those of a file that has the same numbers in F32, bit for bit.
#[test]
fn a_head_in_fp8() {
    let (dir, family, head) = (tempfile::tempdir().unwrap(), "deepseek_v4", "mtp_legacy.safetensors");
    trunk(dir.path(), family, head);
    let alone = tempfile::tempdir().unwrap();
    std::fs::copy(dir.path().join("config.json"), alone.path().join("config.json")).unwrap();
    let file = data(&format!("oracle/{family}/{head}"));
    std::fs::copy(file, alone.path().join("model.safetensors")).unwrap();
    let source = Source::open(alone.path());
    let copies = copies(
        alone.path(),
        &source,
        |_| (),
        |name, shape| {
            let matrix = name.ends_with(".weight") && shape.len() == 2 && shape[1].is_multiple_of(32);
            if matrix { Layout::Fp8Exponent(128, 128) } else { Layout::Plain }
        },
    );
    let open = |copy: &tempfile::TempDir| {
        weights(&Checkpoint::open_with_head(dir.path(), &copy.path().join("model.safetensors")).unwrap())
    };
    let [packed, plain] = [open(&copies[0]), open(&copies[1])];
    let numbers = |(ty, shape, bytes): &(BlockType, Vec<usize>, Vec<u8>)| -> Vec<u32> {
        let mut numbers = vec![0f32; shape.iter().product()];
        minfer_format::decode_row(*ty, bytes, &mut numbers).unwrap();
        numbers.iter().map(|x| x.to_bits()).collect()
    };
    assert!(packed.keys().eq(plain.keys()));
    for (name, weight) in packed.iter().filter(|(_, w)| w.0 == BlockType::F8_E4M3) {
        assert!(numbers(weight) == numbers(&plain[name]), "{name}");
    }
    let quantised = packed.values().filter(|w| w.0 == BlockType::F8_E4M3).count();
    assert!(quantised > 10, "{quantised}");
}

#[test]
fn files_that_are_no_head_of_the_model() {
    let dir = tempfile::tempdir().unwrap();
    trunk(dir.path(), "deepseek_v4", "mtp_legacy.safetensors");
    let place = |name: &str| dir.path().join(name);
    let refusal = |model: &Path, head: &Path| {
        let error = Checkpoint::open_with_head(model, head).err().unwrap().to_string();
        error.replace(dir.path().to_str().unwrap(), "DIR")
    };
    let head = data("oracle/deepseek_v4/mtp_legacy.safetensors");
    assert!(refusal(dir.path(), &place("none")).starts_with("DIR/none: No such file"));
    std::fs::write(place("text"), "this is not a safetensors file").unwrap();
    assert!(refusal(dir.path(), &place("text")).starts_with("DIR/text is not a safetensors file: "));
    std::fs::create_dir(place("folder")).unwrap();
    assert!(
        refusal(dir.path(), &place("folder")).starts_with("DIR/folder is a directory, not a regular file")
    );
    let whole = std::fs::read(&head).unwrap();
    std::fs::write(place("cut"), &whole[..whole.len() - 1]).unwrap();
    assert!(refusal(dir.path(), &place("cut")).starts_with("DIR/cut is truncated: "));

    // Of another model; and of this one, with one name that the model has too.
    let no_head = |model: &str, file: &str, arch: &str| {
        format!(
            "{file} has no tensor of a draft head for {model} ({arch}); name the file that its makers give for it, or \
             leave out --draft-head"
        )
    };
    let other = data("oracle/glm5_next/mtp.safetensors");
    assert_eq!(refusal(dir.path(), &other), no_head("DIR", other.to_str().unwrap(), "deepseek4"));
    let llama = data("oracle/llama");
    let want = no_head(llama.to_str().unwrap(), head.to_str().unwrap(), "llama");
    assert_eq!(refusal(&llama, &head), want);
    rewrite(&head, &place("twice"), |name, data| {
        let name = if name == "mtp.0.norm.weight" { "norm.weight" } else { name };
        Some((name.to_string(), Dtype::F32, data.to_vec()))
    });
    let want = "the tensor 'norm.weight' is in DIR/model.safetensors and in DIR/twice; one of the two files is not part of \
                this model";
    assert_eq!(refusal(dir.path(), &place("twice")), want);

    // A part of a head.
    rewrite(&head, &place("part"), |name, data| {
        (name != "mtp.0.attn.wkv.weight").then(|| (name.to_string(), Dtype::F32, data.to_vec()))
    });
    assert_eq!(refusal(dir.path(), &place("part")), "DIR: tensor 'mtp.0.attn.wkv.weight' is missing");

    // A model with a head, and a file without one.
    let both = tempfile::tempdir().unwrap();
    with_head(both.path(), "deepseek_v4", "mtp_legacy.safetensors");
    assert_eq!(
        refusal(both.path(), &other),
        no_head(both.path().to_str().unwrap(), other.to_str().unwrap(), "deepseek4")
    );

    let gguf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/minfer-nano-Q8_0.gguf");
    let want = format!(
        "{} cannot join {}, which is a GGUF file: a draft head in a file of its own needs a Hugging Face directory; leave \
         out --draft-head, or name the directory",
        head.display(),
        gguf.display()
    );
    assert_eq!(refusal(&gguf, &head), want);
}
