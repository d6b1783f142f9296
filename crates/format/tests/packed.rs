//! Quantised weights of Hugging Face directories: gathered bit for bit, and refused with one clear error.
//! Fixture: `fixtures/packed`, made as `fixtures/README.md` says.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use minfer_format::hf::{Dtype, Packed};
use minfer_format::table::{RowTable, TableOptions, TablePart};
use minfer_format::{BlockType, HfDir, decode_row};
use safetensors::tensor::TensorView;
use serde_json::json;
use tempfile::TempDir;

fn fixture() -> HfDir {
    HfDir::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/packed")).unwrap()
}

fn expected(dir: &HfDir, name: &str) -> (Vec<usize>, Vec<f32>) {
    let name = format!("{name}.expected");
    let numbers =
        dir.data(&name).unwrap().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    (dir.tensor(&name).unwrap().shape.clone(), numbers)
}

fn decoded(packed: &Packed) -> Vec<f32> {
    let mut blocks = vec![0; packed.bytes()];
    packed.unpack(0..packed.rows(), &mut blocks).unwrap();
    let mut numbers = vec![0.0; packed.shape().iter().product()];
    decode_row(packed.ty(), &blocks, &mut numbers).unwrap();
    numbers
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

const ALL: [(&str, BlockType); 13] = [
    ("fp8", BlockType::F8_E4M3),
    ("fp8_bf16", BlockType::F8_E4M3),
    ("fp8_e8m0", BlockType::F8_E4M3),
    ("fp8_stack", BlockType::F8_E4M3),
    ("fp4", BlockType::MXFP4),
    ("affine2", BlockType::AFFINE4),
    ("affine3", BlockType::AFFINE4),
    ("affine4", BlockType::AFFINE4),
    ("affine5", BlockType::AFFINE8),
    ("affine6", BlockType::AFFINE8),
    ("affine8", BlockType::AFFINE8),
    ("affine_stack", BlockType::AFFINE4),
    ("mxfp4", BlockType::MXFP4),
];

/// Reference: torch and MLX, as the fixture's script says. Tolerance: none.
#[test]
fn every_layout_is_gathered_bit_for_bit() {
    let dir = fixture();
    for (name, ty) in ALL {
        let (shape, numbers) = expected(&dir, name);
        let packed = dir.packed(&format!("{name}.weight"), *shape.last().unwrap()).unwrap().unwrap();
        assert_eq!((packed.ty(), packed.shape()), (ty, &shape[..]), "{name}");
        assert_eq!(bits(&decoded(&packed)), bits(&numbers), "{name}");
    }
}

/// Rows on their own, out of order, twice. Reference: the fixture. Tolerance: none.
#[test]
fn tables_read_rows_of_packs() {
    let dir = fixture();
    for (name, ty) in ALL {
        let (shape, numbers) = expected(&dir, name);
        let k = *shape.last().unwrap();
        let part = || TablePart::Packed(dir.packed(&format!("{name}.weight"), k).unwrap().unwrap());
        let table = RowTable::open(vec![part(), part()], ty, k, TableOptions::default()).unwrap();
        let rows = numbers.len() / k;
        assert_eq!(table.rows(), 2 * rows, "{name}");
        let ids = [2 * rows - 1, 0, rows, rows - 1, 0].map(|r| r as i32);
        let mut out = Vec::new();
        table.read(&ids, &mut out).unwrap();
        for (id, row) in ids.iter().zip(out.chunks_exact(k)) {
            assert_eq!(bits(row), bits(&numbers[*id as usize % rows * k..][..k]), "{name}, row {id}");
        }
    }
}

#[test]
fn scales_beside_a_weight_are_not_tensors_of_their_own() {
    let dir = fixture();
    for name in ["fp8_e8m0.scale", "fp4.scale"] {
        assert!(dir.is_packed_scale(name), "{name}");
    }
    let own = directory(
        "{}",
        &[
            ("a.weight", Dtype::F32, &[1, 32], vec![0; 128]),
            ("a.scale", Dtype::F32, &[1], vec![0; 4]),
            ("b.weight", Dtype::F8_E4M3, &[1, 32], vec![0; 32]),
            ("b.weight_scale_inv", Dtype::F32, &[1, 1], vec![0; 4]),
            ("b.scale", Dtype::F32, &[1], vec![0; 4]),
        ],
    );
    let own = HfDir::open(own.path()).unwrap();
    for name in ["a.scale", "b.scale", "b.weight_scale_inv", "none.scale"] {
        assert!(!own.is_packed_scale(name), "{name}");
    }
    assert!(own.packed("a.weight", 32).unwrap().is_none(), "plain numbers");
    assert!(own.packed("none", 32).unwrap().is_none());
}

type Tensor<'a> = (&'a str, Dtype, &'a [usize], Vec<u8>);

fn directory(config: &str, tensors: &[Tensor<'_>]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    dir
}

/// The error of a weight `x.weight` with rows of `k` numbers; it names the tensor and the directory.
fn refusal(config: &str, tensors: &[Tensor<'_>], k: usize) -> String {
    let temp = directory(config, tensors);
    let dir = HfDir::open(temp.path()).unwrap();
    let error = match dir.packed("x.weight", k) {
        Ok(packed) => {
            let packed = packed.expect("x.weight is packed");
            packed.unpack(0..packed.rows(), &mut vec![0; packed.bytes()]).unwrap_err()
        }
        Err(error) => error,
    };
    let text = error.to_string();
    assert!(text.contains("'x.weight'") && text.contains(temp.path().to_str().unwrap()), "{text}");
    text
}

#[test]
fn fp8_with_bad_scales_is_refused() {
    let weight = |byte: u8| ("x.weight", Dtype::F8_E4M3, &[2, 160][..], vec![byte; 320]);
    let scales = |dtype, shape: &'static [usize], data: Vec<u8>| ("x.weight_scale_inv", dtype, shape, data);
    let ones = || [1f32.to_le_bytes(); 2].concat();
    let refused = |tensors: &[Tensor<'_>], with: &str| {
        let text = refusal("{}", tensors, 160);
        assert!(text.contains(with), "{text}");
    };
    refused(&[weight(0)], "neither 'x.weight_scale_inv' nor 'x.scale'");
    refused(&[weight(0), scales(Dtype::F32, &[2, 1], ones())], "[1, 2]");
    refused(&[weight(0), scales(Dtype::I64, &[1, 2], vec![0; 16])], "it is I64");
    for nan in [0x7f, 0xff] {
        refused(&[weight(nan), scales(Dtype::F32, &[1, 2], ones())], "NaN in row 0, column 0");
    }
    let infinite = [1f32.to_le_bytes(), f32::INFINITY.to_le_bytes()].concat();
    refused(&[weight(0), scales(Dtype::F32, &[1, 2], infinite)], "scale or bias inf for row 0");
    refused(
        &[weight(0), ("x.scale", Dtype::F8_E8M0, &[1, 2], vec![127, 255])],
        "scale or bias NaN for row 0",
    );
    let odd = ("x.weight", Dtype::F8_E4M3, &[2, 40][..], vec![0; 80]);
    refused(&[odd, scales(Dtype::F32, &[1, 1], vec![0; 4])], "multiples of 32");
    let vector = ("x.weight", Dtype::F8_E4M3, &[32][..], vec![0; 32]);
    refused(&[vector, scales(Dtype::F32, &[1, 1], vec![0; 4])], "only matrices");
    let whole = [weight(0), scales(Dtype::F32, &[1, 2], ones())];
    for size in ["[0, 128]", "[128]", "128", "[128, -1]", "[1, 99999999999]"] {
        let config = format!(r#"{{"quantization_config": {{"weight_block_size": {size}}}}}"#);
        assert!(refusal(&config, &whole, 160).contains("weight_block_size"), "{size}");
    }
    let config = r#"{"quantization_config": {"weight_block_size": [128, 80]}}"#;
    assert!(refusal(config, &whole, 160).contains("blocks of 80"));
}

#[test]
fn fp4_with_bad_scales_is_refused() {
    let weight = || ("x.weight", Dtype::I8, &[2, 32][..], vec![0; 64]);
    let refused = |tensors: &[Tensor<'_>], with: &str| {
        let text = refusal("{}", tensors, 64);
        assert!(text.contains(with), "{text}");
    };
    refused(&[weight()], "'x.scale' beside it is missing");
    refused(&[weight(), ("x.scale", Dtype::F8_E8M0, &[2, 1], vec![0; 2])], "F8_E8M0 [2, 2]");
    refused(&[weight(), ("x.scale", Dtype::F32, &[2, 2], vec![0; 16])], "it is F32");
    refused(&[weight(), ("x.scale", Dtype::F8_E8M0, &[2, 2], vec![0, 0, 0, 255])], "NaN for row 1");
    refused(&[("x.weight", Dtype::I8, &[1, 12], vec![0; 12])], "rows of 24 numbers");
}

#[test]
fn mlx_packs_that_do_not_fit_are_refused() {
    let weight = || ("x.weight", Dtype::U32, &[2, 8][..], vec![0; 64]);
    let side = |name: &'static str| (name, Dtype::F16, &[2, 1][..], vec![0; 4]);
    let refused = |tensors: &[Tensor<'_>], k: usize, with: &str| {
        let text = refusal("{}", tensors, k);
        assert!(text.contains(with), "{text}");
    };
    refused(&[weight()], 64, "'x.scales' beside it is missing");
    refused(&[weight(), side("x.scales")], 64, "'x.biases' beside it is missing");
    let scales = || side("x.scales");
    for k in [0, 1, 63, 16, 96, 256, 512, usize::MAX] {
        refused(&[weight(), scales(), side("x.biases")], k, &format!("does not hold {k} numbers"));
    }
    refused(&[weight(), scales(), ("x.biases", Dtype::F16, &[1, 1], vec![0; 2])], 64, "it is F16 [1, 1]");
    let infinite = vec![0, 0, 0x00, 0x7c];
    refused(&[weight(), ("x.scales", Dtype::F16, &[2, 1], infinite), side("x.biases")], 64, "inf for row 1");
    // nvfp4 and mxfp8.
    refused(&[weight(), ("x.scales", Dtype::U8, &[2, 4], vec![0; 8])], 64, "(U8)");
    refused(&[weight(), ("x.scales", Dtype::U8, &[2, 1], vec![0; 2])], 32, "(U8)");
}

/// Sizes whose products overflow fit a file when there is a zero among them.
#[test]
fn empty_tensors_are_refused() {
    let huge = usize::MAX / 2;
    for dtype in ["F8_E4M3", "I8", "U32"] {
        for shape in [[0, 32, huge], [huge, huge, 0], [huge, 0, 32], [0, huge, huge]] {
            let weight = json!({"dtype": dtype, "shape": shape, "data_offsets": [0, 0]});
            let header = json!({ "x.weight": weight }).to_string();
            let temp = tempfile::tempdir().unwrap();
            let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
            std::fs::write(temp.path().join("model.safetensors"), file).unwrap();
            std::fs::write(temp.path().join("config.json"), "{}").unwrap();
            match HfDir::open(temp.path()) {
                Ok(dir) => {
                    let error = dir.packed("x.weight", 64).unwrap_err().to_string();
                    assert!(error.contains("matrices with numbers in them"), "{error}");
                }
                // Where a product comes before the zero.
                Err(error) => assert!(error.to_string().contains("overflows"), "{error}"),
            }
        }
    }
}

#[test]
fn methods_that_are_not_known_are_refused() {
    let plain: [Tensor<'_>; 1] = [("a.weight", Dtype::F32, &[1], vec![0; 4])];
    let check = |config: &str, tensors: &[Tensor<'_>]| {
        let dir = directory(config, tensors);
        HfDir::open(dir.path()).unwrap().check_quantisation().map_err(|e| e.to_string())
    };
    for config in [
        "{}",
        r#"{"quantization_config": {"quant_method": "fp8"}}"#,
        r#"{"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64, "mode": "affine"}}"#,
        r#"{"quantization": {"mode": "mxfp4"}}"#,
        r#"{"quantization_config": null}"#,
    ] {
        assert_eq!(check(config, &plain), Ok(()), "{config}");
    }
    for (config, named) in [
        (r#"{"quantization_config": {"quant_method": "awq"}}"#, "'awq'"),
        (r#"{"quantization_config": {"quant_method": "gptq", "bits": 4}}"#, "'gptq'"),
        (r#"{"text_config": {"quantization_config": {"quant_method": "bitsandbytes"}}}"#, "'bitsandbytes'"),
        (r#"{"quantization_config": {"quant_method": 7}}"#, "'?'"),
        (r#"{"quantization": {"mode": "nvfp4"}}"#, "'nvfp4'"),
    ] {
        let error = check(config, &plain).unwrap_err();
        assert!(error.contains(named) && error.contains("supported are FP8"), "{error}");
    }
    let packed: [Tensor<'_>; 1] = [("a.qweight", Dtype::I32, &[1, 4], vec![0; 16])];
    let error = check("{}", &packed).unwrap_err();
    assert!(error.contains("'a.qweight' (I32)"), "{error}");
}
