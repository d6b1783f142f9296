//! Mistakes and damaged files: one clear line each, and the right exit code.
#![cfg(feature = "builtin-model")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::fs;

use common::{Said, minfer, nano_path, refused, said, said_with_stdin, write_without_template};
use minfer_format::GgufWriter;
use minfer_format::gguf::Value;

/// Asserts exit code and that stderr is one `Error:` line with all of these parts.
#[track_caller]
fn fails(said: &Said, code: i32, parts: &[&str]) {
    let errors: Vec<&str> = said.err.lines().filter(|l| !l.starts_with("no model named")).collect();
    assert_eq!((said.code, errors.len(), said.out.as_str()), (Some(code), 1, ""), "{}", said.err);
    assert!(errors[0].starts_with("Error: "), "{}", said.err);
    for part in parts {
        assert!(errors[0].contains(part), "{part:?} is not in {}", said.err);
    }
}

#[test]
fn paths() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("none.gguf");
    let missing = missing.to_str().unwrap();
    refused(&["run", "-m", missing, "hi"], 1, &format!("Error: no such file: {missing}"));
    refused(&["info", missing], 1, &format!("Error: no such file: {missing}"));
    refused(&["bench", "-m", missing, "-o", "json"], 1, &format!("Error: no such file: {missing}"));
    let empty_dir = dir.path().to_str().unwrap();
    let error =
        format!("Error: {empty_dir} has no config.json; name a Hugging Face model directory or a GGUF file");
    refused(&["run", "-m", empty_dir, "hi"], 1, &error);
    refused(&["info", empty_dir], 1, &error);
}

#[test]
fn damaged_files() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_string()
    };
    let nano = fs::read(nano_path()).unwrap();
    let empty = write("empty.gguf", b"");
    refused(
        &["run", "-m", &empty, "hi"],
        1,
        &format!("Error: {empty} is empty (0 bytes); download or copy it again"),
    );
    // In the header, in the tensor list, in the data.
    for (name, len) in [("head.gguf", 20), ("list.gguf", 200_000), ("data.gguf", nano.len() - 1000)] {
        let path = write(name, &nano[..len]);
        let parts = [path.as_str(), "is truncated", "download or copy it again"];
        fails(&said(minfer(&["run", "-m", &path, "hi"])), 1, &parts);
        fails(&said(minfer(&["info", &path])), 1, &parts);
    }
    let text = write("text.gguf", b"this is not a model at all, it is text");
    fails(&said(minfer(&["run", "-m", &text, "hi"])), 1, &[&text, "is not a GGUF file"]);
}

#[test]
fn architectures_that_are_not_supported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mamba.gguf");
    let mut writer = GgufWriter::new();
    writer.set("general.architecture", Value::String("mamba".into()));
    writer.tensor("x", minfer_format::BlockType::F32, &[1], &[0; 4]).unwrap();
    writer.write_file(&path).unwrap();
    let path = path.to_str().unwrap();
    let parts = ["architecture 'mamba' is not supported; supported are: llama, qwen2, qwen3, qwen3moe"];
    fails(&said(minfer(&["run", "-m", path, "hi"])), 1, &parts);
    fails(&said(minfer(&["info", path])), 1, &parts);
}

#[test]
fn prompts() {
    let empty = ["the prompt is empty; give it as an argument or on stdin"];
    for args in [&["run", ""][..], &["run", " \n"], &["run", "--raw", ""], &["run"]] {
        fails(&said(minfer(args)), 2, &empty);
    }
    fails(&said_with_stdin(minfer(&["run"]), b"\n"), 2, &empty);
    fails(&said_with_stdin(minfer(&["run"]), b"caf\xe9"), 1, &["not valid UTF-8", "first wrong byte at 3"]);
    let long = "word ".repeat(3000);
    let parts = ["of the context's 2048 are in use", "--ctx", "shorten the prompt"];
    fails(&said_with_stdin(minfer(&["run"]), long.as_bytes()), 1, &parts);
    fails(
        &said(minfer(&["run", "--ctx", "8", "What is 27 + 58?"])),
        1,
        &["0 of the context's 8 are in use", "up to 2048"],
    );
}

#[test]
fn a_model_without_a_template() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plain.gguf");
    write_without_template(&path);
    let path = path.to_str().unwrap();
    let error =
        "Error: the model has no chat template; give the prompt with --raw, or use a model that has one";
    refused(&["run", "-m", path, "hi"], 1, error);
    let raw = said(minfer(&["run", "-m", path, "--raw", "-n", "3", "Once upon a time"]));
    assert_eq!(raw.code, Some(0), "{}", raw.err);
    let info = said(minfer(&["info", path]));
    assert!(info.out.contains("chat template no (use --raw)"), "{}", info.out);
}

#[test]
fn flags() {
    let run = |args: &[&str]| said(minfer(&[&["run", "-m", "/does/not/exist"], args].concat()));
    fails(&run(&["--bogus", "hi"]), 2, &["unexpected argument '--bogus'", "see --help"]);
    fails(&run(&["--bakend", "cpu", "hi"]), 2, &["tip:", "'--backend'"]);
    fails(&run(&["-n", "0", "hi"]), 2, &["--max-tokens", "must be at least 1"]);
    fails(&run(&["--ctx", "0", "hi"]), 2, &["--ctx", "must be at least 1"]);
    fails(&run(&["-t", "0", "hi"]), 2, &["--threads", "must be between 1 and 1024"]);
    fails(&run(&["-t", "many", "hi"]), 2, &["--threads", "must be a whole number"]);
    fails(&run(&["--temp", "-1", "hi"]), 2, &["the temperature is -1; it must be a number from 0 up"]);
    fails(&run(&["--temp", "nan", "hi"]), 2, &["the temperature is NaN"]);
    fails(&run(&["--top-p", "1.5", "hi"]), 2, &["top-p is 1.5"]);
    fails(&run(&["--repeat-penalty", "0", "hi"]), 2, &["the repetition penalty is 0"]);
    fails(&run(&["--logit-bias", "x", "hi"]), 2, &["must be a token id and a number"]);
    fails(&run(&["--stop", "", "hi"]), 2, &["stop string 0 is empty"]);
    fails(&run(&["--kv", "q4", "hi"]), 2, &["'q4'", "f32, f16"]);
    fails(&run(&["--raw", "--system", "x", "hi"]), 2, &["--system", "cannot be used with"]);
    fails(&run(&["--dump-graph", "graph.txt", "hi"]), 2, &["must end in .dot or .json"]);
    fails(&said(minfer(&["bench", "-p", "0", "-n", "0"])), 2, &["nothing to measure"]);
    fails(&said(minfer(&["bench", "-t", "0"])), 2, &["must be between 1 and 1024"]);
    fails(&said(minfer(&["bench", "-b", "0"])), 2, &["must be at least 1"]);
    fails(&said(minfer(&["bench", "-p", "x"])), 2, &["must be a whole number"]);
    fails(&said(minfer(&["bench", "-m", "x", "--shape", "y"])), 2, &["cannot be used with"]);
    for shape in ["nonsense", "qwen3-0.6b", "qwen3-0.6b:q9_9"] {
        let parts = [&format!("unknown shape '{shape}'"), "qwen3-0.6b", "q4_k_m"];
        fails(&said(minfer(&["info", "--shape", shape])), 2, &parts);
        fails(&said(minfer(&["bench", "--shape", shape, "-o", "json"])), 2, &parts);
    }
}

#[test]
fn limits_of_the_model() {
    let ctx = said(minfer(&["run", "--ctx", "100000", "hi"]));
    fails(&ctx, 1, &["a context of 100000 tokens (--ctx) exceeds the 2048 that this model was made for"]);
    let bias = said(minfer(&["run", "--logit-bias", "99999=1", "hi"]));
    fails(&bias, 1, &["token 99999 of --logit-bias is outside the model's vocabulary of 8192"]);
    let dump = "/does/not/exist/graph.dot";
    fails(
        &said(minfer(&["run", "--dump-graph", dump, "hi"])),
        1,
        &["cannot write /does/not/exist/graph.dot"],
    );
    // No table without results.
    let deep = said(minfer(&["bench", "-p", "0", "-d", "4000"]));
    assert_eq!((deep.code, deep.out.as_str()), (Some(1), ""));
    assert!(deep.err.ends_with(
        "Error: a context of 4128 tokens (--ctx) exceeds the 2048 that this model was made for\n"
    ));
}
