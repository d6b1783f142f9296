//! llama.cpp's `llama-bench` as a child process: a test goes in, its tokens per second come out.

use std::io::{self, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use minfer_engine::KvFormat;
use serde::Deserialize;
use thiserror::Error;

use super::config::{Phase, Test};
use crate::error::Failure;

/// Bytes of standard output that are read; a test's JSON takes about two thousand.
const MOST_OUTPUT: u64 = 1 << 24;
/// Bytes of standard error that are kept for messages.
const KEPT_TALK: usize = 4096;
/// Lines of what it said last, and characters of each, that a message shows.
const SHOWN_LINES: usize = 3;
const SHOWN_CHARS: usize = 200;
/// How often its end is looked for once it has closed its output.
const POLL: Duration = Duration::from_millis(5);

/// What llama-bench did instead of measuring.
#[derive(Debug, Error)]
pub(crate) enum PeerError {
    #[error("cannot run {}: {source}; --compare takes the path of llama.cpp's llama-bench", program.display())]
    Start { program: PathBuf, source: io::Error },
    #[error("{} failed ({status}){}", program.display(), said(last))]
    Failed { program: PathBuf, status: ExitStatus, last: String },
    #[error("{} printed no JSON as llama-bench's -o json does ({why}){}", program.display(), said(last))]
    NoJson { program: PathBuf, why: serde_json::Error, last: String },
    #[error("{} gave no speed for the test {test}{}", program.display(), said(last))]
    NoSuchTest { program: PathBuf, test: String, last: String },
}

fn said(last: &str) -> String {
    if last.is_empty() { String::new() } else { format!("; it said last: {last}") }
}

/// What one run of a test gave.
pub(super) struct Speed {
    pub(super) tokens_per_second: f64,
    /// Which llama.cpp it is, as far as it says.
    pub(super) build: String,
}

/// An element of the JSON. What is not read here may change from version to version.
#[derive(Deserialize)]
struct Entry {
    n_prompt: usize,
    n_gen: usize,
    #[serde(default)]
    n_depth: usize,
    /// Tokens per second, the mean of the repetitions.
    avg_ts: f64,
    #[serde(default)]
    build_commit: String,
    #[serde(default)]
    backends: String,
}

/// The program, and the model file that it measures.
pub(super) struct Peer {
    program: PathBuf,
    model: PathBuf,
    /// The child, while there is one. The handler of Ctrl-C ends it, and keeps the lock so that no other starts.
    running: Arc<Mutex<Option<Child>>>,
}

fn lock(running: &Mutex<Option<Child>>) -> MutexGuard<'_, Option<Child>> {
    // Nothing that is done under the lock leaves it half done.
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Peer {
    /// Sees that the program can be run, and makes Ctrl-C end it together with this process.
    pub(super) fn open(program: PathBuf, model: PathBuf) -> Result<Peer, Failure> {
        let peer = Peer { program, model, running: Arc::default() };
        let running = peer.running.clone();
        ctrlc::set_handler(move || {
            let mut child = lock(&running);
            if let Some(child) = child.as_mut() {
                // It may have ended by itself, or by the same Ctrl-C.
                let _ = child.kill();
                let _ = child.wait();
            }
            std::process::exit(130);
        })?;
        let mut help = Command::new(&peer.program);
        help.arg("--help");
        peer.output(help)?;
        Ok(peer)
    }

    /// One repetition of `test` after the warm-up that llama-bench makes by itself.
    pub(super) fn measure(&self, test: &Test, threads: usize, kv: KvFormat) -> Result<Speed, PeerError> {
        let (json, last) = self.output(self.command(test, threads, kv))?;
        let (program, test_name) = (self.program.clone(), test.label());
        let entries: Vec<Entry> = match serde_json::from_slice(&json) {
            Ok(entries) => entries,
            Err(why) => return Err(PeerError::NoJson { program, why, last }),
        };
        let (prompt, generate) = counts(test);
        let asked = |e: &Entry| (e.n_prompt, e.n_gen, e.n_depth) == (prompt, generate, test.depth);
        match entries.into_iter().find(|e| asked(e) && e.avg_ts.is_finite() && e.avg_ts > 0.0) {
            Some(e) => Ok(Speed { tokens_per_second: e.avg_ts, build: build(&e) }),
            None => Err(PeerError::NoSuchTest { program, test: test_name, last }),
        }
    }

    fn command(&self, test: &Test, threads: usize, kv: KvFormat) -> Command {
        let (prompt, generate) = counts(test);
        let mut command = Command::new(&self.program);
        command.arg("-m").arg(&self.model).args([
            "-o",
            "json",
            "-r",
            "1",
            "-ctk",
            kv.name(),
            "-ctv",
            kv.name(),
        ]);
        let mut number = |flag, n: usize| {
            command.arg(flag).arg(n.to_string());
        };
        number("-p", prompt);
        number("-n", generate);
        number("-t", threads);
        // Older versions do not know the flag.
        if test.depth > 0 {
            number("-d", test.depth);
        }
        command
    }

    /// Runs it to its end: standard output, and the last lines of what it said.
    fn output(&self, command: Command) -> Result<(Vec<u8>, String), PeerError> {
        let ended = self.start(command).and_then(|(stdout, talk)| {
            let mut out = Vec::new();
            // The pipe closes here: a program that writes on without end fails.
            let read = stdout.take(MOST_OUTPUT).read_to_end(&mut out);
            let status = self.wait()?;
            read?;
            let talk = talk.join().unwrap_or_default();
            Ok((status, out, talk))
        });
        let program = self.program.clone();
        let (status, out, talk) = ended.map_err(|source| PeerError::Start { program, source })?;
        let last = last_lines(if talk.trim_ascii().is_empty() { &out } else { &talk });
        match status.success() {
            true => Ok((out, last)),
            false => Err(PeerError::Failed { program: self.program.clone(), status, last }),
        }
    }

    fn start(&self, mut command: Command) -> io::Result<(ChildStdout, JoinHandle<Vec<u8>>)> {
        // The reader comes first: once the child runs, nothing may fail before its end is awaited.
        let (reader, writer) = io::pipe()?;
        let talk = std::thread::Builder::new().spawn(move || last_bytes(reader))?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(writer);
        let mut running = lock(&self.running);
        let mut child = command.spawn()?;
        let stdout = child.stdout.take();
        *running = Some(child);
        stdout.map(|out| (out, talk)).ok_or_else(|| io::Error::other("its standard output is missing"))
    }

    /// Waits without holding the lock for long, so that Ctrl-C comes through.
    fn wait(&self) -> io::Result<ExitStatus> {
        loop {
            let mut running = lock(&self.running);
            let status = match running.as_mut() {
                Some(child) => child.try_wait()?,
                None => return Err(io::Error::other("its process is missing")),
            };
            if let Some(status) = status {
                *running = None;
                return Ok(status);
            }
            drop(running);
            std::thread::sleep(POLL);
        }
    }
}

/// Tokens of the prompt and generated tokens.
fn counts(test: &Test) -> (usize, usize) {
    match test.phase {
        Phase::Prompt => (test.tokens, 0),
        Phase::Generate => (0, test.tokens),
    }
}

fn build(entry: &Entry) -> String {
    let commit = if entry.build_commit.is_empty() { "unknown" } else { &entry.build_commit };
    let backends = if entry.backends.is_empty() { "unknown" } else { &entry.backends };
    format!("llama.cpp {commit} ({backends})")
}

/// Reads to the end and keeps the last bytes.
fn last_bytes(mut reader: impl Read) -> Vec<u8> {
    let (mut kept, mut part) = (Vec::new(), [0; KEPT_TALK]);
    while let Ok(n @ 1..) = reader.read(&mut part) {
        kept.extend_from_slice(&part[..n]);
        kept.drain(..kept.len().saturating_sub(KEPT_TALK));
    }
    kept
}

/// The last lines with something in them as one, without what would disturb a terminal.
fn last_lines(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(KEPT_TALK)..]).into_owned();
    let clean = |line: &str| -> String {
        line.trim().chars().filter(|c| !c.is_control()).take(SHOWN_CHARS).collect()
    };
    let lines: Vec<String> = text.lines().map(clean).filter(|l| !l.is_empty()).collect();
    lines[lines.len().saturating_sub(SHOWN_LINES)..].join(" / ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_end_is_kept() {
        let long = vec![b'x'; 3 * KEPT_TALK + 1];
        let talk = [&long[..], b"\nthe end"].concat();
        let kept = last_bytes(&talk[..]);
        assert_eq!(kept.len(), KEPT_TALK);
        assert!(kept.ends_with(b"xx\nthe end"));
    }

    #[test]
    fn the_last_lines_as_one() {
        assert_eq!(last_lines(b"a\nb\n\n c \r\n\x1b[31md\n\n"), "b / c / [31md");
        assert_eq!(last_lines(b" \n\n"), "");
        assert_eq!(last_lines(&[b'y'; 10 * KEPT_TALK]), "y".repeat(SHOWN_CHARS));
    }
}
