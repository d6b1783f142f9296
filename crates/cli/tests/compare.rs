//! `bench --compare` with programs that stand in for llama-bench, and (ignored) with the real one.
#![cfg(all(unix, feature = "builtin-model"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Said, minfer, nano_path, refused, said};
use serde_json::Value as Json;
use tempfile::TempDir;

/// Answers `--help`, notes every other call in the file `calls`, and reads the flags of the test.
const START: &str = r#"#!/bin/sh
[ "$1" = --help ] && exit 0
here=$(dirname "$0")
echo "$@" >> "$here/calls"
d=0
while [ $# -gt 0 ]; do
  case $1 in -p) p=$2;; -n) n=$2;; -d) d=$2;; esac
  shift
done
"#;

/// The n-th call measures n hundred tokens per second.
const MEASURE: &str = r#"
speed=$(($(wc -l < "$here/calls") * 100))
echo "load: a word that is no JSON" >&2
echo '[{"build_commit": "abc123", "backends": "CPU", "n_prompt": '$p', "n_gen": '$n', "n_depth": '$d','
echo '  "avg_ts": '$speed'.0, "unknown": [1]}]'
"#;

/// A folder with a program `llama-bench` that ends with these lines.
fn fake(end: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("llama-bench");
    std::fs::write(&path, format!("{START}{end}")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    (dir, path)
}

fn bench(program: &Path, more: &[&str]) -> Command {
    let mut command = minfer(&["bench", "-t", "1", "--compare"]);
    command.arg(program).arg("-m").arg(nano_path()).args(more);
    command
}

/// Without the line that debug builds print.
fn errors(said: &Said) -> String {
    let notes = ["this is a debug build", "weights repacked: "];
    said.err.lines().filter(|l| !notes.iter().any(|n| l.starts_with(n))).collect::<Vec<_>>().join("\n")
}

#[track_caller]
fn fails(end: &str, expected: impl Fn(&str) -> String) {
    let (_dir, path) = fake(end);
    let said = said(bench(&path, &["-p", "0", "-n", "2", "--pairs", "1"]));
    assert_eq!((said.code, said.out.as_str()), (Some(1), ""), "{}", said.err);
    assert_eq!(errors(&said), expected(path.to_str().unwrap()));
}

#[track_caller]
fn number(value: &Json) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn pairs_as_json() {
    let (dir, path) = fake(MEASURE);
    let more = ["-p", "8", "-n", "2", "-d", "0,16", "--kv", "f32", "--pairs", "3", "-o", "json"];
    let said = said(bench(&path, &more));
    assert_eq!(said.code, Some(0), "{}", said.err);
    let rows: Json = serde_json::from_str(&said.out).unwrap();
    let rows = rows.as_array().unwrap();
    let tests: Vec<_> = rows.iter().map(|r| (r["test"].as_str().unwrap(), number(&r["depth"]))).collect();
    assert_eq!(tests, [("pp8", 0.0), ("tg2", 0.0), ("pp8", 16.0), ("tg2", 16.0)]);
    for (i, row) in rows.iter().enumerate() {
        assert_eq!((&row["threads"], &row["kv"], &row["device"]), (&1.into(), &"f32".into(), &"cpu".into()));
        assert_eq!(
            (&row["model"], &row["llama_cpp_build"]),
            (&"minfer-nano-Q8_0.gguf".into(), &"llama.cpp abc123 (CPU)".into())
        );
        let pairs = row["pairs"].as_array().unwrap();
        let first: Vec<_> = pairs.iter().map(|p| p["first"].as_str().unwrap()).collect();
        assert_eq!(first, ["minfer", "llama.cpp", "minfer"]);
        // The fake counts its calls, three for each test.
        let speeds: Vec<_> = pairs.iter().map(|p| number(&p["llama_cpp"]) / 100.0 - 3.0 * i as f64).collect();
        assert_eq!(speeds, [1.0, 2.0, 3.0]);
        assert_eq!(number(&row["llama_cpp_tokens_per_second"]["median"]), (3 * i + 2) as f64 * 100.0);
        let mut ratios: Vec<f64> = pairs.iter().map(|p| number(&p["ratio"])).collect();
        for (pair, ratio) in pairs.iter().zip(&ratios) {
            let expected = number(&pair["minfer"]) / number(&pair["llama_cpp"]);
            assert!(expected > 0.0 && (ratio / expected - 1.0).abs() < 1e-9, "{pair}");
            assert!(number(&pair["bandwidth_gbps"]) > 0.0);
        }
        ratios.sort_by(f64::total_cmp);
        let spread = ["min", "median", "max"].map(|name| number(&row["ratio"][name]));
        assert_eq!(spread.to_vec(), ratios);
    }
    let calls = std::fs::read_to_string(dir.path().join("calls")).unwrap();
    let nano = nano_path();
    let call =
        |test: &str| format!("-m {} -o json -r 1 -ctk f32 -ctv f32 {test}\n", nano.display()).repeat(3);
    let expected = ["-p 8 -n 0 -t 1", "-p 0 -n 2 -t 1", "-p 8 -n 0 -t 1 -d 16", "-p 0 -n 2 -t 1 -d 16"];
    assert_eq!(calls, expected.map(call).concat());
}

#[test]
fn pairs_as_a_table() {
    let (_dir, path) = fake(MEASURE);
    let said = said(bench(&path, &["-p", "0", "-n", "2", "-d", "32", "-b", "1", "--pairs", "2"]));
    assert_eq!((said.code, errors(&said).as_str()), (Some(0), ""));
    let lines: Vec<&str> = said.out.lines().collect();
    assert_eq!(lines.len(), 3, "{}", said.out);
    let columns = "| model | test | threads | minfer tok/s | llama.cpp tok/s | ratio | pairs | memory GB/s |";
    assert_eq!(lines[0], columns);
    let cells: Vec<&str> = lines[2].trim_matches('|').split('|').map(str::trim).collect();
    assert_eq!(cells[..3], ["minfer-nano-Q8_0.gguf", "tg2 @ d32", "1"]);
    assert_eq!((cells[4], cells[6], cells.len()), ("150.00", "2", 8));
    let numbers: Vec<f64> =
        cells[5].split([' ', '[', ']']).flat_map(|c| c.split("..")).filter_map(|c| c.parse().ok()).collect();
    assert!(numbers.len() == 3 && numbers[1] <= numbers[0] && numbers[0] <= numbers[2], "{}", cells[5]);
}

#[test]
fn programs_that_do_not_measure() {
    fails("echo loading; echo >&2; echo 'no such model' >&2; exit 3", |path| {
        format!("Error: {path} failed (exit status: 3); it said last: no such model")
    });
    fails("echo '| a | table |'", |path| {
        format!(
            "Error: {path} printed no JSON as llama-bench's -o json does (expected value at line 1 column 1); it \
             said last: | a | table |"
        )
    });
    let other = "Error: PATH gave no speed for the test tg2; it said last: an old version";
    for entries in ["[]", r#"[{"n_prompt": 2, "n_gen": 0, "avg_ts": 5}]"#] {
        fails(&format!("echo an old version >&2; echo '{entries}'"), |path| other.replace("PATH", path));
    }
    let zero = r#"echo an old version >&2; echo '[{"n_prompt": 0, "n_gen": 2, "avg_ts": 0}]'"#;
    fails(zero, |path| other.replace("PATH", path));
    fails("kill -9 $$", |path| format!("Error: {path} failed (signal: 9 (SIGKILL))"));
}

/// Output without end is not collected, and ends the program.
#[test]
fn output_without_end() {
    let (_dir, path) = fake("exec yes");
    let said = said(bench(&path, &["-p", "0", "-n", "2", "--pairs", "1"]));
    assert_eq!(said.code, Some(1));
    assert!(errors(&said).starts_with(&format!("Error: {} failed (", path.display())), "{}", said.err);
    assert!(errors(&said).lines().count() == 1 && said.err.len() < 2000, "{}", said.err);
}

#[test]
fn programs_that_cannot_be_run() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("llama-bench");
    let expected = format!(
        "Error: cannot run {}: No such file or directory (os error 2); --compare takes the path of llama.cpp's \
         llama-bench",
        missing.display()
    );
    let said_of = |program: &Path| said(bench(program, &[]));
    assert_eq!((said_of(&missing).code, errors(&said_of(&missing))), (Some(1), expected));
    // Something that is there, but fails before any model is loaded.
    std::fs::write(&missing, "#!/bin/sh\necho \"$1: no library\" >&2; exit 127\n").unwrap();
    std::fs::set_permissions(&missing, std::fs::Permissions::from_mode(0o755)).unwrap();
    let said = said_of(&missing);
    let expected =
        format!("Error: {} failed (exit status: 127); it said last: --help: no library\n", missing.display());
    assert_eq!((said.code, said.err), (Some(1), expected));
}

#[test]
fn what_cannot_be_compared() {
    let nano = nano_path();
    let nano = nano.to_str().unwrap();
    let no = "/does/not/exist";
    let mistake = |args: &[&str], error: &str| {
        let args = [&["bench", "--compare", no], args].concat();
        refused(&args, 2, &format!("Error: {error}"));
    };
    let needs = "--compare needs a model that llama-bench can read too: name a GGUF file with -m";
    mistake(&["--shape", "qwen3-0.6b:q4_0"], &format!("{needs}, not a --shape"));
    let built_in = "(the built-in model's is models/minfer-nano-Q8_0.gguf in the source)";
    mistake(&[], &format!("{needs} {built_in}"));
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().to_str().unwrap();
    let directory =
        format!("--compare needs a GGUF file, which llama-bench can read too, but {dir} is a directory");
    mistake(&["-m", dir], &directory);
    let batch = "--compare measures one sequence at a time: leave out --batch, or set it to 1";
    mistake(&["-m", nano, "-b", "1,8"], batch);
    mistake(&["-m", nano, "--speculate", "auto"], "--compare measures without drafts: leave out --speculate");
    let head = "--compare measures without a draft head: leave out --draft-head";
    mistake(&["-m", nano, "--draft-head", "x.safetensors"], head);
    let rounding =
        "--compare measures without --official-rounding, which llama.cpp does not have: leave it out";
    mistake(&["-m", nano, "--official-rounding"], rounding);
    for pairs in ["0", "100"] {
        let range = "for '--pairs <N>': must be between 1 and 99; see --help";
        mistake(&["-m", nano, "--pairs", pairs], &format!("invalid value '{pairs}' {range}"));
    }
    let repetitions =
        "the argument '--compare <PATH>' cannot be used with '--repetitions <REPETITIONS>'; see --help";
    let repetitions = repetitions.replace("<REPETITIONS>", "<N>");
    mistake(&["-m", nano, "-r", "2"], &repetitions);
    let alone = said(minfer(&["bench", "--pairs", "3"]));
    assert_eq!(alone.code, Some(2));
    assert!(alone.err.contains("--compare <PATH>"), "{}", alone.err);
    refused(&["bench", "-m", no, "--compare", no], 1, &format!("Error: no such file: {no}"));
}

#[test]
fn help_tells_how() {
    let help = said(minfer(&["bench", "--help"])).out;
    for part in
        ["--compare <PATH>", "--pairs <N>", "[default: 5]", "--compare llama.cpp/build/bin/llama-bench"]
    {
        assert!(help.contains(part), "{part:?} is not in\n{help}");
    }
}

fn runs(pid: &str) -> bool {
    let probe = Command::new("kill").args(["-0", pid]).stderr(Stdio::null()).status();
    probe.unwrap().success()
}

#[test]
fn ctrl_c_leaves_no_child() {
    let (dir, path) = fake("echo $$ > \"$here/new\"; mv \"$here/new\" \"$here/pid\"; exec sleep 100");
    let mut command = bench(&path, &["-p", "0", "-n", "2"]);
    let mut ours = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    let pid = loop {
        match std::fs::read_to_string(dir.path().join("pid")) {
            Ok(pid) => break pid.trim().to_string(),
            Err(_) => assert!(started.elapsed() < Duration::from_secs(60), "llama-bench was not started"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert!(runs(&pid));
    // To minfer alone; a terminal sends it to both.
    assert!(Command::new("kill").args(["-INT", &ours.id().to_string()]).status().unwrap().success());
    assert_eq!(ours.wait().unwrap().code(), Some(130));
    assert!(!runs(&pid), "process {pid} is left");
}

/// With the program in `MINFER_LLAMA_BENCH` and a GGUF file in `MINFER_MODEL`:
/// `cargo test -p minfer --test compare -- --ignored --nocapture`.
#[test]
#[ignore = "needs MINFER_LLAMA_BENCH and MINFER_MODEL"]
fn the_real_one() {
    let path = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let (program, model) = (path("MINFER_LLAMA_BENCH"), path("MINFER_MODEL"));
    let flags = ["-p", "64", "-n", "16", "-d", "0,32", "--pairs", "2", "-o", "json"];
    let said = said(minfer(&[&["bench", "-m", &model, "--compare", &program], &flags[..]].concat()));
    assert_eq!(said.code, Some(0), "{}", said.err);
    println!("{}", said.out);
    let rows: Json = serde_json::from_str(&said.out).unwrap();
    assert_eq!(rows.as_array().unwrap().len(), 4);
    for row in rows.as_array().unwrap() {
        assert!(
            number(&row["ratio"]["median"]) > 0.0 && number(&row["bandwidth_gbps"]["min"]) > 0.1,
            "{row}"
        );
    }
}
