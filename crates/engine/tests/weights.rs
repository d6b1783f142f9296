//! How weights are kept changes no bit of the logits: repacked or as in the file, mapped, read or locked, for every type,
//! dense and with experts. Reference: weights in memory, repacked, on one thread. Tolerance: none.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use common::tiny::{Tiny, tokens};
use common::{bits, cpu, logits_in_chunks, open, options};
use minfer_cpu::{CpuDevice, Isa};
use minfer_engine::{Checkpoint, Engine, EngineOptions, WeightOptions};
use minfer_format::{BlockType, Reading};

/// Long enough for a prompt of many rows, and single ones after it.
const LENGTH: usize = 40;
const CHUNKS: [usize; 3] = [37, 1, 2];

fn with(weights: WeightOptions, threads: usize, isa: Isa) -> EngineOptions {
    let device = CpuDevice::with_weights(threads, isa, weights).unwrap();
    let reading = if weights.mmap { Reading::Mapped } else { Reading::Plain };
    EngineOptions { devices: vec![Arc::new(device)], reading, ..options(threads) }
}

#[test]
fn no_choice_changes_a_bit() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = tokens(LENGTH, 3);
    for ty in BlockType::ggml() {
        for moe in [false, true] {
            let tiny = Tiny::new(ty, moe);
            let one = EngineOptions { devices: cpu(1, Isa::detect()), ..options(1) };
            let want = bits(&logits_in_chunks(&mut open(&tiny.open(), one), &prompt, &[LENGTH]));
            let path = dir.path().join("tiny.gguf");
            fs::write(&path, tiny.to_bytes()).unwrap();
            let model = Checkpoint::open(&path).unwrap();
            for (mmap, repack) in [(true, true), (false, true), (true, false), (false, false)] {
                let weights = WeightOptions { mmap, repack, lock: false };
                let mut engine = open(&model, with(weights, 2, Isa::detect()));
                let got = bits(&logits_in_chunks(&mut engine, &prompt, &CHUNKS));
                assert_eq!(got, want, "{ty}, experts: {moe}, {weights:?}");
            }
        }
    }
}

/// The numbers are the same, and the system says that more is locked.
#[test]
#[cfg(target_os = "linux")]
fn locked_weights_are_locked_and_equal() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    let tiny = Tiny::new(BlockType::Q4_K, true);
    fs::write(&path, tiny.to_bytes()).unwrap();
    let model = Checkpoint::open(&path).unwrap();
    let prompt = tokens(LENGTH, 3);
    let want = bits(&logits_in_chunks(&mut open(&model, options(1)), &prompt, &[LENGTH]));
    for (mmap, repack) in [(true, true), (false, true), (true, false)] {
        let weights = WeightOptions { mmap, repack, lock: true };
        let before = locked_kib();
        let mut engine = match Engine::open(&model, with(weights, 1, Isa::detect()), &mut |_, _| ()) {
            Ok(engine) => engine,
            // Where even this is too much, the error says so and what to do.
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains("RLIMIT_MEMLOCK allows") && error.contains("--mlock"), "{error}");
                continue;
            }
        };
        assert!(locked_kib() > before + 100, "{weights:?}");
        assert_eq!(bits(&logits_in_chunks(&mut engine, &prompt, &CHUNKS)), want, "{weights:?}");
    }
}

fn locked_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// A file that became shorter is one error that names it and the tensor, not a signal.
#[test]
fn a_shorter_file_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    fs::write(&path, Tiny::new(BlockType::Q8_0, false).to_bytes()).unwrap();
    let model = Checkpoint::open(&path).unwrap();
    cut(&path);
    let weights = WeightOptions { mmap: false, ..WeightOptions::default() };
    let error = match Engine::open(&model, with(weights, 1, Isa::detect()), &mut |_, _| ()) {
        Ok(_) => panic!("half of the weights are gone"),
        Err(error) => error.to_string(),
    };
    for part in ["tiny.gguf has become shorter: the tensor 'blk.", "download or copy it again"] {
        assert!(error.contains(part), "{part:?} is not in {error}");
    }
}

fn cut(path: &Path) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
}
