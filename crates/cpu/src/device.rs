//! The CPU as a [`Device`]: opening it, its weights, and what it supports (everything).
//!
//! It is synchronous: each call has finished when it returns. All work of one device is serialised by its
//! stream lock, so that programs, page copies and arena access never overlap, whichever engine they serve.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use minfer_format::{BlockType, TensorBytes, decode_row};
use minfer_graph::{DeviceId, DeviceKind, Graph, Node, WeightDecl, WeightUse};
use minfer_runtime::{
    Arena, Descriptor, Device, DeviceError, KvFormat, Memory, OpenOptions, Program, ProgramSpec, Speed,
    StateBuffer, StateSpec, Unavailable, WaitError, WeightHandle,
};

use crate::memory::CpuArena;
use crate::pack::{GROUP, PackedMatrix, group_bytes, pack_into};
use crate::pool::{Pool, default_threads};
use crate::{Isa, Kernels, program, state, topology_text};

/// The descriptor for the registry.
pub const DESCRIPTOR: Descriptor = Descriptor {
    kind: DeviceKind::Cpu,
    priority: 100,
    unavailable: "the CPU cannot be disabled",
    count: |_| Ok(1),
    open: |_, options| open(options),
};

fn open(options: &OpenOptions) -> Result<Arc<dyn Device>, Unavailable> {
    let threads = options.threads.unwrap_or_else(default_threads);
    let device = CpuDevice::new(threads, Isa::detect());
    device.map(|d| Arc::new(d) as Arc<dyn Device>).map_err(|e| Unavailable(e.to_string()))
}

/// What a device's programs, arenas and states share.
pub(crate) struct Shared {
    pub(crate) pool: Pool,
    pub(crate) isa: Isa,
    pub(crate) kernels: Kernels,
    stream: Mutex<()>,
}

impl Shared {
    /// The stream: whoever holds it may touch the memory of arenas and states.
    pub(crate) fn stream(&self) -> MutexGuard<'_, ()> {
        // The lock guards no data of its own, so a panic while it was held leaves nothing inconsistent.
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The host's processor.
pub struct CpuDevice {
    shared: Arc<Shared>,
}

impl CpuDevice {
    /// A CPU device with `threads` workers and the kernels of `isa`.
    ///
    /// # Errors
    /// When threads cannot be started, or the machine lacks the instruction set.
    pub fn new(threads: usize, isa: Isa) -> std::io::Result<CpuDevice> {
        let lacking = || std::io::Error::other(format!("this machine cannot run {} kernels", isa.name()));
        let kernels = Kernels::for_isa(isa).ok_or_else(lacking)?;
        let shared = Shared { pool: Pool::new(threads)?, isa, kernels, stream: Mutex::new(()) };
        Ok(CpuDevice { shared: Arc::new(shared) })
    }

    /// Packs `n` rows of `k` numbers on all threads.
    fn pack(&self, ty: BlockType, n: usize, k: usize, raw: &[u8]) -> Result<PackedMatrix, DeviceError> {
        let failed = |e: crate::pack::PackError| DeviceError::Failed(e.to_string());
        let mut packed = PackedMatrix::zeroed(ty, n, k).map_err(|e| match e {
            crate::pack::PackError::Memory { bytes } => out_of_memory(bytes, "a packed weight"),
            e => failed(e),
        })?;
        // Some 256 KiB at a time: enough to amortise the lock, small enough to balance.
        let chunk = (256 * 1024 / group_bytes(ty, k).unwrap_or(1).max(1)).max(1);
        let bytes = group_bytes(ty, k).unwrap_or(0) * chunk;
        if bytes == 0 {
            return Ok(packed);
        }
        let groups = n.div_ceil(GROUP);
        let work = Mutex::new(packed.bytes_mut().chunks_mut(bytes).enumerate());
        let error = Mutex::new(None);
        let next = || work.lock().unwrap_or_else(PoisonError::into_inner).next();
        let run = self.shared.pool.run(&|_| {
            while let Some((i, out)) = next() {
                let range = i * chunk..((i + 1) * chunk).min(groups);
                if let Err(e) = pack_into(ty, n, k, raw, range, out) {
                    error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                }
            }
        });
        run.map_err(|e| DeviceError::Failed(e.to_string()))?;
        let error = error.into_inner().unwrap_or_else(PoisonError::into_inner);
        error.map_or(Ok(packed), |e| Err(failed(e)))
    }
}

/// A weight in this device's memory.
pub(crate) enum CpuWeight {
    /// In the file's order, for looking up rows: usually pages of the mapped file.
    Rows { ty: BlockType, bytes: TensorBytes },
    /// Decoded numbers.
    Vector(Vec<f32>),
    /// Packed for products.
    Matrix(PackedMatrix),
    /// One packed matrix per expert or head.
    Stack(Vec<PackedMatrix>),
}

pub(crate) fn out_of_memory(bytes: usize, what: &str) -> DeviceError {
    DeviceError::OutOfMemory { bytes, what: what.to_string() }
}

/// `[n, k]` and the number of such matrices.
fn matrices(decl: &WeightDecl) -> Option<(usize, usize, usize)> {
    match decl.shape[..] {
        [n, k] => Some((1, n, k)),
        [experts, n, k] => Some((experts, n, k)),
        _ => None,
    }
}

impl Device for CpuDevice {
    fn id(&self) -> DeviceId {
        DeviceId::CPU
    }

    fn describe(&self) -> String {
        let name = topology_text::model_name().unwrap_or_else(|| std::env::consts::ARCH.to_string());
        format!("{name}, {} threads, {} kernels", self.shared.pool.threads(), self.shared.isa.name())
    }

    fn supports(&self, _graph: &Graph, _node: &Node) -> bool {
        true
    }

    fn reads_kv(&self, format: KvFormat) -> bool {
        matches!(format, KvFormat::F32 | KvFormat::F16 | KvFormat::Q8_0)
    }

    fn memory(&self) -> Memory {
        topology_text::available_memory()
    }

    fn speed(&self) -> Speed {
        Speed { bytes_per_second: 30e9, copy_latency: 0.0, copy_bytes_per_second: 30e9 }
    }

    fn is_async(&self) -> bool {
        false
    }

    fn weight_bytes(&self, decl: &WeightDecl, how: WeightUse) -> Option<u64> {
        let bytes = match how {
            // Rows stay in the mapped file, whose pages the system can drop and reread.
            WeightUse::Rows => 0,
            WeightUse::Vector => decl.shape.iter().product::<usize>().checked_mul(4)?,
            WeightUse::Matrix | WeightUse::Experts | WeightUse::Heads => {
                let (count, n, k) = matrices(decl)?;
                PackedMatrix::packed_bytes(decl.ty, n, k)?.checked_mul(count)?
            }
        };
        Some(bytes as u64)
    }

    fn load_weight(
        &self,
        decl: &WeightDecl,
        how: WeightUse,
        data: TensorBytes,
    ) -> Result<WeightHandle, DeviceError> {
        let expected = decl.bytes().unwrap_or(usize::MAX);
        if data.len() != expected {
            let why = format!("'{}' has {} bytes, its shape needs {expected}", decl.name, data.len());
            return Err(DeviceError::Failed(why));
        }
        let weight = match how {
            WeightUse::Rows => CpuWeight::Rows { ty: decl.ty, bytes: data },
            WeightUse::Vector => {
                let mut numbers = vec![0.0; decl.shape.iter().product()];
                decode_row(decl.ty, &data, &mut numbers).map_err(|e| DeviceError::Failed(e.to_string()))?;
                CpuWeight::Vector(numbers)
            }
            WeightUse::Matrix | WeightUse::Experts | WeightUse::Heads => {
                let unfit = || DeviceError::Unsupported(format!("'{}' of shape {:?}", decl.name, decl.shape));
                let (count, n, k) = matrices(decl).ok_or_else(unfit)?;
                let size = (data.len() / count.max(1)).max(1);
                let packed = data.chunks_exact(size).map(|raw| self.pack(decl.ty, n, k, raw));
                let mut packed = packed.collect::<Result<Vec<_>, _>>()?;
                match how {
                    WeightUse::Experts | WeightUse::Heads => CpuWeight::Stack(packed),
                    _ => CpuWeight::Matrix(packed.pop().ok_or_else(unfit)?),
                }
            }
        };
        Ok(Arc::new(weight))
    }

    fn open_state(&self, spec: &StateSpec) -> Result<Arc<dyn StateBuffer>, DeviceError> {
        state::open(self.shared.clone(), spec)
    }

    fn open_arena(&self, bytes: usize) -> Result<Arc<dyn Arena>, DeviceError> {
        Ok(Arc::new(CpuArena::new(self.shared.clone(), bytes)?))
    }

    fn compile(&self, spec: &ProgramSpec<'_>) -> Result<Box<dyn Program>, DeviceError> {
        program::compile(self.shared.clone(), spec)
    }

    fn synchronize(&self, _timeout: Duration) -> Result<(), WaitError> {
        Ok(())
    }

    fn recover(&self, _timeout: Duration) -> Result<(), WaitError> {
        Ok(())
    }
}
