//! What ends a command early, as one line, and its exit code.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use minfer_engine::EngineError;
use minfer_model::ModelError;
use minfer_runtime::BackendError;
use thiserror::Error;

use crate::bench::PeerError;

/// A command that failed.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    #[error("{0}")]
    Usage(String),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("no such file: {}", .0.display())]
    NoSuchFile(PathBuf),
    #[cfg_attr(feature = "builtin-model", allow(dead_code))]
    #[error(
        "no model: this build has none built in (cargo feature 'builtin-model'); name a GGUF file or a Hugging \
         Face directory"
    )]
    NoModel,
    #[error("cannot read the prompt from stdin: {0}")]
    Stdin(io::Error),
    #[error("the prompt on stdin is not valid UTF-8 (first wrong byte at {at}); convert it first")]
    StdinNotUtf8 { at: usize },
    #[error("the prompt on stdin is longer than {limit} bytes")]
    StdinTooLong { limit: u64 },
    #[error("token {id} of --logit-bias is outside the model's vocabulary of {vocab}")]
    BiasOutOfRange { id: u32, vocab: usize },
    #[error("the model has no draft head, which --speculate mtp needs; use --speculate auto or leave it out")]
    NoDraftHead,
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot write to stdout: {0}")]
    Stdout(io::Error),
    #[error("cannot listen for Ctrl-C: {0}")]
    Signals(#[from] ctrlc::Error),
    #[error(transparent)]
    Peer(#[from] PeerError),
    #[error("cannot start a thread to measure the memory's speed: {0}")]
    Probe(io::Error),
    #[error("internal: cannot write JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The reader of stdout has gone, as in `minfer run … | head -1`: not a failure to talk about.
    #[error("the reader of stdout has gone")]
    ClosedPipe,
}

impl Failure {
    /// 2 for what the user can mend on the command line alone, else 1.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Failure::Usage(_) | Failure::Backend(_) | Failure::NoModel => 2,
            Failure::Engine(EngineError::Backend(_)) => 2,
            _ => 1,
        }
    }

    /// An error of writing to stdout.
    pub(crate) fn stdout(error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::ClosedPipe,
            _ => Failure::Stdout(error),
        }
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Failure {
        // A shape is a word on the command line, not a file.
        match error {
            ModelError::UnknownShape { .. } => Failure::Usage(error.to_string()),
            error => Failure::Engine(error.into()),
        }
    }
}

/// Prints help and version as clap makes them, and its errors as one line.
pub(crate) fn report_usage(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // Fails only when the reader has gone.
            let _ = error.print();
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitCode::from(2)
        }
        _ => {
            crate::note(format_args!("Error: {}", one_line(&error.render().to_string())));
            ExitCode::from(2)
        }
    }
}

/// What clap says in paragraphs, without its usage block.
fn one_line(rendered: &str) -> String {
    let said = rendered.trim_start_matches("error: ");
    let lines = said.lines().map(str::trim).take_while(|l| !l.starts_with("Usage:"));
    let parts: Vec<&str> =
        lines.filter(|l| !l.is_empty() && !l.starts_with("For more information")).collect();
    format!("{}; see --help", parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_become_a_line() {
        let rendered = "error: unexpected argument '--bakend' found\n\n  tip: a similar argument exists: \
                        '--backend'\n\nUsage: minfer run [OPTIONS] [PROMPT]\n\nFor more information, try '--help'.\n";
        let expected =
            "unexpected argument '--bakend' found; tip: a similar argument exists: '--backend'; see --help";
        assert_eq!(one_line(rendered), expected);
    }

    #[test]
    fn exit_codes() {
        assert_eq!(Failure::Usage(String::new()).exit_code(), 2);
        assert_eq!(Failure::Backend(BackendError::NoCpu).exit_code(), 2);
        assert_eq!(Failure::Engine(EngineError::Backend(BackendError::NoCpu)).exit_code(), 2);
        assert_eq!(Failure::Engine(EngineError::EmptyPrompt).exit_code(), 1);
        assert_eq!(Failure::NoSuchFile(PathBuf::new()).exit_code(), 1);
        assert_eq!(Failure::NoDraftHead.exit_code(), 1);
    }
}
