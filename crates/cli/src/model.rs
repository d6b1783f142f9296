//! Which model a command works on, opening it (headers only; weights load later), and the context that it gets.

use std::path::{Path, PathBuf};

use minfer_engine::{EngineError, EngineOptions, Hyper};
use minfer_model::{Checkpoint, Shape};

use crate::builtin;
use crate::error::Failure;

/// Where the model comes from.
pub(crate) enum Source {
    BuiltIn,
    Path(PathBuf),
    /// A directory, and the file with its draft head.
    WithHead(PathBuf, PathBuf),
    /// `NAME:TYPE`, not judged yet.
    Shape(String),
}

impl Source {
    /// clap has made sure that at most one of the first two is given, and a draft head only with a path.
    pub(crate) fn new(path: Option<PathBuf>, shape: Option<String>, head: Option<PathBuf>) -> Source {
        match (path, shape) {
            (Some(path), _) => match head {
                Some(head) => Source::WithHead(path, head),
                None => Source::Path(path),
            },
            (None, Some(shape)) => Source::Shape(shape),
            (None, None) => Source::BuiltIn,
        }
    }

    pub(crate) fn open(&self) -> Result<Checkpoint, Failure> {
        match self {
            Source::BuiltIn => builtin::open(),
            Source::Path(path) => {
                exists(path)?;
                Ok(Checkpoint::open(path)?)
            }
            Source::WithHead(path, head) => {
                exists(path)?;
                exists(head)?;
                Ok(Checkpoint::open_with_head(path, head)?)
            }
            Source::Shape(text) => Ok(Checkpoint::Shape(Shape::parse(text)?)),
        }
    }

    /// Says on stderr that the built-in model is used, if it is.
    pub(crate) fn announce(&self) {
        if matches!(self, Source::BuiltIn) {
            crate::note(format_args!(
                "no model named (-m): using the built-in minfer-nano, a toy of 29 M parameters that is often wrong"
            ));
        }
    }

    /// A short name for tables.
    pub(crate) fn label(&self) -> String {
        match self {
            Source::BuiltIn => builtin::NAME.to_string(),
            Source::Path(path) | Source::WithHead(path, _) => match path.file_name() {
                Some(name) => name.to_string_lossy().into_owned(),
                None => path.display().to_string(),
            },
            Source::Shape(text) => text.clone(),
        }
    }
}

/// What the engine would choose or refuse, before weights are loaded for it.
pub(crate) fn context_size(asked: Option<usize>, hyper: &Hyper) -> Result<usize, EngineError> {
    match asked {
        Some(asked) if asked > hyper.context => {
            Err(EngineError::ContextTooLong { asked, allowed: hyper.context })
        }
        Some(asked) => Ok(asked),
        None => Ok(hyper.context.min(EngineOptions::DEFAULT_CONTEXT)),
    }
}

fn exists(path: &Path) -> Result<(), Failure> {
    match std::fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Err(Failure::NoSuchFile(path.to_owned())),
        // Whatever else is wrong is said where the file is read.
        _ => Ok(()),
    }
}
