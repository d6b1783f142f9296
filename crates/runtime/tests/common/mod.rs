//! A device for tests, graphs for it, and helpers to run them.
//!
//! [`device::TestDevice`] implements the public `Device` trait, synchronously like the CPU or on a thread
//! of its own like a GPU; [`ops`] is the plain scalar arithmetic that every instance shares, so that a
//! graph's results are equal bit for bit wherever its nodes run; [`graphs`] builds graphs and steps.
//! Nothing here is compiled into the library.
#![allow(dead_code, unreachable_pub, unused_imports)]

pub mod device;
pub mod graphs;
pub mod ops;
pub mod stream;

pub use device::{Config, TestDevice, cpu, everything, gpu, only};
pub use graphs::{Bits, Recipe, Source, WIDTH, build, execute, open, open_with, options, step};
pub use stream::{Event, Fault};
