//! `minfer run` on the built-in model: what it answers, and how it ends.
#![cfg(feature = "builtin-model")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Said, minfer, nano_path, said, said_with_stdin};

const SUM: &str = "What is 27 + 58?";
const ANSWER: &str = "27 + 58 = 85.\n";

#[track_caller]
fn answers(said: &Said, out: &str) {
    assert_eq!((said.code, said.out.as_str()), (Some(0), out), "{}", said.err);
}

/// `prompt 24 tokens, 512.3 tok/s; generated 41 tokens, 210.9 tok/s`
#[track_caller]
fn ends_with_speed(err: &str) {
    let last = err.lines().last().unwrap_or_default();
    let (prompt, generated) = last.split_once("; ").unwrap_or_else(|| panic!("{err}"));
    assert!(prompt.starts_with("prompt ") && prompt.ends_with(" tok/s"), "{err}");
    assert!(generated.starts_with("generated ") && generated.ends_with(" tok/s"), "{err}");
}

#[test]
fn answers_of_the_built_in_model() {
    let sum = said(minfer(&["run", SUM]));
    answers(&sum, ANSWER);
    ends_with_speed(&sum.err);
    // One line says which model it is, one how fast it was.
    assert_eq!(sum.err.lines().count(), 2, "{}", sum.err);
    assert!(sum.err.starts_with("no model named (-m): using the built-in minfer-nano"), "{}", sum.err);
    let list = said(minfer(&["run", "Write this as a JSON list of strings: yellow, boastful, woman"]));
    answers(&list, "[\"yellow\", \"boastful\", \"woman\"]\n");
}

#[test]
fn the_same_model_by_path_and_on_any_number_of_threads() {
    let path = nano_path();
    let by_path = said(minfer(&["run", "-m", path.to_str().unwrap(), "-t", "1", SUM]));
    answers(&by_path, ANSWER);
    assert_eq!(by_path.err.lines().count(), 1, "{}", by_path.err);
    answers(&said(minfer(&["run", "-t", "3", SUM])), ANSWER);
    answers(&said(minfer(&["run", "--kv", "f32", SUM])), ANSWER);
}

/// However weights are kept, the answer is the same, and one line more says how.
#[test]
fn ways_of_keeping_weights() {
    let path = nano_path();
    let run = |flags: &[&str]| {
        let args = [&["run", "-m", path.to_str().unwrap()], flags, &[SUM]].concat();
        said(minfer(&args))
    };
    for (flags, said) in [
        (&["--no-repack"][..], "weights as in the file: "),
        (&["--no-mmap"], "weights repacked, not mapped: "),
        (&["--no-repack", "--no-mmap"], "weights as in the file, not mapped: "),
    ] {
        let kept = run(flags);
        answers(&kept, ANSWER);
        let first = kept.err.lines().next().unwrap();
        assert!(
            first.starts_with(said) && first.ends_with(" s") && first.contains(" of memory, "),
            "{first}"
        );
        assert_eq!(kept.err.lines().count(), 2, "{}", kept.err);
    }
    // Not every machine lets a process lock 31 MB; then the error says which limit it is, and what to do.
    let locked = run(&["--mlock"]);
    match locked.code {
        Some(0) => assert!(locked.err.starts_with("weights repacked, locked: "), "{}", locked.err),
        _ => {
            assert_eq!((locked.code, locked.err.lines().count()), (Some(1), 1), "{}", locked.err);
            for part in ["RLIMIT_MEMLOCK", "ulimit -l unlimited", "leave out --mlock"] {
                assert!(locked.err.contains(part), "{part:?} is not in {}", locked.err);
            }
        }
    }
}

#[test]
fn the_prompt_from_stdin() {
    answers(&said_with_stdin(minfer(&["run"]), format!("{SUM}\n").as_bytes()), ANSWER);
    answers(&said_with_stdin(minfer(&["run"]), SUM.as_bytes()), ANSWER);
}

#[test]
fn stop_strings_and_limits() {
    answers(&said(minfer(&["run", "--stop", " = 8", SUM])), "27 + 58\n");
    answers(&said(minfer(&["run", "--stop", "zebra", "--stop", " 58", SUM])), "27 +\n");
    let short = said(minfer(&["run", "-n", "3", SUM]));
    assert_eq!(short.code, Some(0));
    assert!(ANSWER.starts_with(short.out.trim_end()) && short.out.len() < ANSWER.len(), "{}", short.out);
    assert!(short.err.contains("stopped at the most tokens asked for; raise -n"), "{}", short.err);
    let full = said(minfer(&["run", "--raw", "--ignore-eos", "--ctx", "24", "Once upon a time"]));
    assert_eq!(full.code, Some(0));
    let line = "stopped because the context of 24 tokens is full; raise --ctx (up to 2048 for this model)";
    assert!(full.err.contains(line), "{}", full.err);
}

#[test]
fn sampling_is_repeatable() {
    let story = |seed: &str| {
        let args = ["run", "--raw", "-n", "20", "--temp", "1.2", "--seed", seed, "Once upon a time"];
        said(minfer(&args)).out
    };
    assert_eq!(story("1"), story("1"));
    assert_ne!(story("1"), story("2"));
}

/// The end of the answer is a token that the file names; forbidding it keeps the model talking.
#[test]
fn a_forbidden_token_does_not_come() {
    let answer = said(minfer(&["run", "-n", "40", "--logit-bias", "2=-inf", "--logit-bias", "0=-inf", SUM]));
    assert_eq!(answer.code, Some(0), "{}", answer.err);
    assert!(answer.out.len() > ANSWER.len() && answer.out.starts_with(ANSWER.trim_end()), "{}", answer.out);
    assert!(answer.err.contains("raise -n"), "{}", answer.err);
}

#[test]
fn a_reader_that_goes_away() {
    let mut child = minfer(&["run", "--raw", "--ignore-eos", "-n", "400", "The list:\n1. one\n2. two\n"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{err}");
    assert!(!err.contains("panic") && !err.contains("Error"), "{err}");
}

#[cfg(unix)]
#[test]
fn interrupted() {
    let mut child = minfer(&["run", "--raw", "--ignore-eos", "Once upon a time"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The first text shows that generation is under way.
    let mut out = child.stdout.take().unwrap();
    let mut bytes = vec![0; 8];
    out.read_exact(&mut bytes).unwrap();
    let started = Instant::now();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    out.read_to_end(&mut bytes).unwrap();
    let status = child.wait().unwrap();
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(status.code(), Some(130), "{err}");
    assert!(bytes.ends_with(b"\n"));
    ends_with_speed(&err);
}

#[test]
fn graphs_and_details() {
    let dir = tempfile::tempdir().unwrap();
    let (dot, json) = (dir.path().join("graph.dot"), dir.path().join("graph.json"));
    let verbose = said(minfer(&["run", "--verbose", "--dump-graph", dot.to_str().unwrap(), SUM]));
    answers(&verbose, ANSWER);
    for part in ["device cpu: ", "keys and values in f16", "graph: ", "  cpu: ", "copies 0, waits 0"] {
        assert!(verbose.err.contains(part), "{part:?} is not in {}", verbose.err);
    }
    assert!(std::fs::read_to_string(dot).unwrap().starts_with("digraph minfer {"));
    answers(&said(minfer(&["run", "--dump-graph", json.to_str().unwrap(), SUM])), ANSWER);
    let graph: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    let nodes = graph["nodes"].as_array().unwrap();
    assert!(nodes.len() > 50 && nodes.iter().all(|n| n["place"]["device"] == "cpu"));
}
