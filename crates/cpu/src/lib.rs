//! The CPU device: a thread pool and the kernels that run on it.
//!
//! In: slices of one row or one block of rows, weights packed for the machine. Out: the same numbers on
//! every instruction set and for every number of rows, chunks and threads. Each operation is defined by
//! a scalar function that is meant to be read; the kernels for AVX2, AVX-512 and AMX equal it bit for bit,
//! because all follow the order of sums that [`math`] lays down. Which kernel runs is decided once ([`Kernels`], [`Isa`]).
//!
//! On top of the kernels, [`device`] is the CPU as the runtime sees it and `program` runs a split.
//! What does not belong here: shapes of models, plans, who owns pages and states.

pub mod attention;
pub mod compress;
pub mod conv;
pub mod delta_rule;
pub mod device;
pub mod elementwise;
pub mod embed;
pub mod index;
pub mod isa;
mod kernels;
pub mod math;
pub mod matmul;
mod memory;
pub mod norm;
pub mod pack;
pub mod pool;
mod program;
pub mod quantize;
pub mod rope;
pub mod round_trip;
pub mod router;
pub mod select;
mod state;
pub mod streams;
#[cfg(test)]
mod testing;
mod topology_text;
mod weights;

pub use device::{CpuDevice, DESCRIPTOR};
pub use isa::Isa;
pub use kernels::Kernels;
