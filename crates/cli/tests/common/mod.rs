//! Running the real binary, and model files to run it on.
#![allow(dead_code)] // Each test file uses its own part.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use minfer_format::{Gguf, GgufWriter};

/// `minfer` with a clean environment of its own variables.
pub(crate) fn minfer(args: &[&str]) -> Command {
    clean(Path::new(env!("CARGO_BIN_EXE_minfer")), args)
}

/// An example of this package: the same program with other devices.
pub(crate) fn example(name: &str, args: &[&str]) -> Command {
    let folder = Path::new(env!("CARGO_BIN_EXE_minfer")).with_file_name("examples");
    let path = folder.join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    assert!(path.exists(), "{} is missing: run `cargo build --examples -p minfer`", path.display());
    clean(&path, args)
}

fn clean(path: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(path);
    command.args(args).stdin(Stdio::null());
    let ours = std::env::vars_os().map(|(name, _)| name);
    for name in ours.filter(|n| n.to_string_lossy().starts_with("MINFER_")) {
        command.env_remove(name);
    }
    command
}

/// What a finished process said.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

pub(crate) fn said(mut command: Command) -> Said {
    from_output(command.output().unwrap())
}

/// With these bytes on stdin.
pub(crate) fn said_with_stdin(mut command: Command, stdin: &[u8]) -> Said {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A process that fails early does not read.
    let _ = child.stdin.take().unwrap().write_all(stdin);
    from_output(child.wait_with_output().unwrap())
}

fn from_output(output: Output) -> Said {
    Said {
        code: output.status.code(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Asserts that `args` fail with this code and with `error` as the only line on stderr.
#[track_caller]
pub(crate) fn refused(args: &[&str], code: i32, error: &str) {
    let expected = Said { code: Some(code), out: String::new(), err: format!("{error}\n") };
    assert_eq!(said(minfer(args)), expected);
}

pub(crate) fn nano_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/minfer-nano-Q8_0.gguf")
}

/// The built-in model as a file without its chat template.
pub(crate) fn write_without_template(path: &Path) {
    let nano = Gguf::open(&nano_path()).unwrap();
    let data: Vec<_> = nano.tensors().iter().map(|t| nano.data(&t.name).unwrap()).collect();
    let mut writer = GgufWriter::new();
    for (key, value) in nano.metadata().iter().filter(|(key, _)| *key != "tokenizer.chat_template") {
        writer.set(key, value.clone());
    }
    for (tensor, bytes) in nano.tensors().iter().zip(&data) {
        writer.tensor(&tensor.name, tensor.ty, &tensor.shape, bytes).unwrap();
    }
    writer.write_file(path).unwrap();
}
