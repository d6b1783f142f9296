//! `minfer info`: what a model is and what it needs, without loading its weights.
//!
//! [`collect`](collect::Info::collect) reads, [`structure`] looks at the graph, [`tensors`] at the files, [`text`] prints for people, serde for programs.

mod collect;
mod structure;
mod tensors;
mod text;

use std::io::{Write, stdout};

use crate::args::InfoArgs;
use crate::error::Failure;
use crate::model::Source;
use collect::Info;

pub(crate) fn info(args: InfoArgs) -> Result<(), Failure> {
    let source = Source::new(args.model, args.shape, args.draft_head);
    let info = Info::collect(&source.open()?, args.context, args.tensors)?;
    let printed = if args.json { serde_json::to_string_pretty(&info)? + "\n" } else { text::print(&info) };
    stdout().write_all(printed.as_bytes()).map_err(Failure::stdout)
}
