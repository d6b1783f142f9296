//! `info` of quantised directories: the parameters, names and shapes of the model, whatever integers the files keep them
//! in. Reference: a directory with the same numbers in F32.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
#[path = "../../engine/tests/common/quantised.rs"]
#[allow(dead_code, unreachable_pub)]
mod quantised;

use std::collections::BTreeMap;
use std::path::Path;

use common::{minfer, said};
use minfer_format::HfDir;
use quantised::{Layout, Source, copies};
use safetensors::Dtype;
use serde_json::{Value as Json, json};

fn info(dir: &Path) -> Json {
    let said = said(minfer(&["info", "--json", "--tensors", dir.to_str().unwrap()]));
    assert_eq!(said.code, Some(0), "{}", said.err);
    serde_json::from_str(&said.out).unwrap()
}

/// Name and shape of every tensor.
fn shapes(info: &Json) -> BTreeMap<String, Json> {
    let tensors = info["tensors"].as_array().unwrap().iter();
    tensors.map(|t| (t["name"].as_str().unwrap().to_string(), t["shape"].clone())).collect()
}

fn matrix(name: &str, shape: &[usize]) -> bool {
    let k = shape.last().unwrap();
    name.ends_with(".weight") && !name.contains("conv") && shape.len() >= 2 && k.is_multiple_of(32)
}

/// Compares with the F32 twin and gives how many tensors there are of each type.
fn compare(
    family: &str,
    change: impl FnOnce(&mut Source),
    edit: impl FnOnce(&mut Json),
    choose: impl Fn(&str, &[usize]) -> Layout,
) -> BTreeMap<String, u64> {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/oracle").join(family);
    let mut source = Source::open(&from);
    change(&mut source);
    let dirs = copies(&from, &source, edit, choose);
    let [packed, plain] = [0, 1].map(|i| info(dirs[i].path()));
    for what in ["parameters", "active_parameters"] {
        assert!(plain[what].as_u64().unwrap() > 10_000);
        assert_eq!(packed[what], plain[what], "{family}: {what}");
    }
    assert_eq!(shapes(&packed), shapes(&plain), "{family}");
    // No byte of the files is lost or counted twice.
    let stored: usize = HfDir::open(dirs[0].path()).unwrap().tensors().map(|t| t.n_bytes()).sum();
    let types = packed["tensor_types"].as_array().unwrap();
    assert_eq!(types.iter().map(|t| t["bytes"].as_u64().unwrap()).sum::<u64>(), stored as u64, "{family}");
    types.iter().map(|t| (t["type"].as_str().unwrap().to_string(), t["tensors"].as_u64().unwrap())).collect()
}

fn names(types: &BTreeMap<String, u64>) -> Vec<&str> {
    types.keys().map(String::as_str).collect()
}

#[test]
fn fp8_and_fp4() {
    let types = compare(
        "deepseek_v4",
        |_| (),
        |_| (),
        |name, shape| match matrix(name, shape) {
            true if name.contains(".experts.") => Layout::Fp4,
            true => Layout::Fp8Exponent(128, 128),
            false => Layout::Plain,
        },
    );
    assert_eq!(names(&types), ["F32", "F8_E4M3", "I64", "MXFP4"]);
    assert_eq!(types["MXFP4"], 5 * 8 * 2, "gate and up of 8 experts in 5 layers");

    let quantisation = json!({"quant_method": "fp8", "weight_block_size": [32, 64]});
    let edit = |config: &mut Json| config["quantization_config"] = quantisation;
    let types = compare(
        "glm5_next",
        |_| (),
        edit,
        |name, shape| match matrix(name, shape) {
            true => Layout::Fp8Inverse(32, 64),
            false => Layout::Plain,
        },
    );
    assert_eq!(names(&types), ["F32", "F8_E4M3"]);
}

/// Packs of MLX in words, whose width the graph tells; and one that the model does not read, whose bits are in the
/// configuration.
#[test]
fn mlx() {
    let widths = [2, 3, 4, 5, 6, 8];
    let affine =
        |name: &str| Layout::Affine(widths[name.len() % 6], 32, [Dtype::F32, Dtype::BF16][name.len() % 2]);
    let extra = |s: &mut Source| {
        s.stack_experts(8, 64);
        for name in ["other.a.weight", "other.b.weight"] {
            let numbers = (0..6 * 96).map(|i| (i % 11) as f32).collect();
            s.floats.insert(name.to_string(), quantised::Numbers { shape: vec![6, 96], numbers });
        }
    };
    let edit = |config: &mut Json| {
        config["quantization"] =
            json!({"group_size": 32, "bits": 4, "other.b": {"group_size": 32, "bits": 8}});
    };
    let types = compare("qwen4_exp", extra, edit, |name, shape| match (name, matrix(name, shape)) {
        ("other.a.weight", _) => Layout::Affine(4, 32, Dtype::F32),
        ("other.b.weight", _) => Layout::Affine(8, 32, Dtype::BF16),
        (_, true) => affine(name),
        (_, false) => Layout::Plain,
    });
    assert_eq!(names(&types), ["AFFINE4", "AFFINE8", "F32", "I64"]);

    let types = compare(
        "qwen3",
        |_| (),
        |_| (),
        |name, shape| match matrix(name, shape) {
            true if name.contains("embed") => Layout::Affine(8, 64, Dtype::BF16),
            true => Layout::Mxfp4,
            false => Layout::Plain,
        },
    );
    assert_eq!(names(&types), ["AFFINE8", "F32", "MXFP4"]);
    assert_eq!(types["AFFINE8"], 1, "the embedding");
}
