//! The ops of hybrid models as whole graphs on the CPU device: against references in f64, and the invariances
//! that the engine relies on (instruction sets, threads, cuts of a sequence into steps), bit for bit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod compressed;
mod harness;
mod latent;
mod recurrent;
mod rows;
mod sparse;
