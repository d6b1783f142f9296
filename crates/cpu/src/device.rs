//! The CPU as a [`Device`]: opening it, its weights, and what it supports (everything).
//!
//! It is synchronous: each call has finished when it returns. All work of one device is serialised by its
//! stream lock, so that programs, page copies and arena access never overlap, whichever engine they serve.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use minfer_format::{BlockType, TensorBytes, decode_row};
use minfer_graph::{DeviceId, DeviceKind, Graph, Node, WeightDecl, WeightMap, WeightUse};
use minfer_runtime::{
    Arena, Descriptor, Device, DeviceError, KvFormat, Memory, OpenOptions, Program, ProgramSpec, Speed,
    StateBuffer, StateSpec, Unavailable, WaitError, WeightHandle, WeightOptions,
};

use crate::memory::CpuArena;
use crate::pack::{GROUP, PackError, PackedMatrix, group_bytes, pack_into};
use crate::pool::{Pool, default_threads};
use crate::program::PerWorker;
use crate::weights::{CpuWeight, Matrix, PackScratch, WeightMemory};
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
    let device = CpuDevice::with_weights(threads, Isa::detect(), options.weights);
    device.map(|d| Arc::new(d) as Arc<dyn Device>).map_err(|e| Unavailable(e.to_string()))
}

/// What a device's programs, arenas and states share.
pub(crate) struct Shared {
    pub(crate) pool: Pool,
    pub(crate) isa: Isa,
    pub(crate) kernels: Kernels,
    /// For weights that are packed on the way; a worker's own during a run.
    pub(crate) pack_scratch: PerWorker<PackScratch>,
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
    weights: WeightOptions,
    memory: WeightMemory,
}

impl CpuDevice {
    /// A CPU device with `threads` workers and the kernels of `isa`.
    ///
    /// # Errors
    /// When threads cannot be started, or the machine lacks the instruction set.
    pub fn new(threads: usize, isa: Isa) -> std::io::Result<CpuDevice> {
        let lacking = || std::io::Error::other(format!("this machine cannot run {} kernels", isa.name()));
        let kernels = Kernels::for_isa(isa).ok_or_else(lacking)?;
        let pool = Pool::new(threads)?;
        let pack_scratch = PerWorker::new(pool.threads(), PackScratch::default);
        let shared = Shared { pool, isa, kernels, pack_scratch, stream: Mutex::new(()) };
        let memory = WeightMemory::new(false);
        Ok(CpuDevice { shared: Arc::new(shared), weights: WeightOptions::default(), memory })
    }

    /// The same with a choice of how weights are kept.
    ///
    /// # Errors
    /// As [`CpuDevice::new`].
    pub fn with_weights(threads: usize, isa: Isa, weights: WeightOptions) -> std::io::Result<CpuDevice> {
        Ok(CpuDevice { weights, memory: WeightMemory::new(weights.lock), ..CpuDevice::new(threads, isa)? })
    }

    /// Packs a stack of matrices of `n` rows of `k` numbers on all threads.
    fn pack(&self, shape: Shape, data: &TensorBytes) -> Result<Vec<PackedMatrix>, DeviceError> {
        let Shape { ty, count, n, k } = shape;
        let failed = |e: PackError| DeviceError::Failed(e.to_string());
        let (Some(row_bytes), Some(bytes), Some(group)) =
            (ty.row_bytes(k), PackedMatrix::packed_bytes(ty, n, k), group_bytes(ty, k))
        else {
            return Err(failed(PackError::Shape { ty, n, k }));
        };
        let matrix = |_| PackedMatrix::in_memory(ty, n, k, self.memory.take(bytes)?).map_err(failed);
        let mut packed = (0..count).map(matrix).collect::<Result<Vec<_>, _>>()?;
        if bytes == 0 {
            return Ok(packed);
        }
        // Some 256 KiB at a time: enough to amortise the lock, small enough to balance.
        let chunk = (256 * 1024 / group).max(1);
        let parts = packed.iter_mut().enumerate().flat_map(|(m, matrix)| {
            let parts = matrix.bytes_mut().chunks_mut(group * chunk).enumerate();
            parts.map(move |(part, out)| (m, part * chunk, out))
        });
        let work = Mutex::new(parts);
        let error = Mutex::new(None);
        data.will_need();
        let next = || work.lock().unwrap_or_else(PoisonError::into_inner).next();
        let run = self.shared.pool.run(&|_| {
            while let Some((m, first, out)) = next() {
                let groups = first..first + out.len() / group;
                let rows = GROUP * groups.start..(GROUP * groups.end).min(n);
                let at = |row: usize| (m * n + row) * row_bytes;
                // What has been packed need not be in memory twice.
                let Some(raw) = data.slice(at(rows.start)..at(rows.end)) else { continue };
                if let Err(e) = pack_into(ty, rows.len(), k, &raw, 0..groups.len(), out) {
                    error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                }
                raw.release();
            }
        });
        run.map_err(|e| DeviceError::Failed(e.to_string()))?;
        // Once more: reading a part maps some pages of its neighbours.
        data.release();
        let error = error.into_inner().unwrap_or_else(PoisonError::into_inner);
        error.map_or(Ok(packed), |e| Err(failed(e)))
    }

    /// Matrices for products, packed or as in the file.
    fn matrices(&self, decl: &WeightDecl, data: TensorBytes) -> Result<Vec<Matrix>, DeviceError> {
        let unfit = || DeviceError::Unsupported(format!("'{}' of shape {:?}", decl.name, decl.shape));
        let shape = Shape::of(decl).ok_or_else(unfit)?;
        if self.weights.repack {
            return Ok(self.pack(shape, &data)?.into_iter().map(Matrix::Packed).collect());
        }
        let data = self.kept(data)?;
        let size = data.len() / shape.count.max(1);
        let matrix = |i: usize| {
            let bytes = data.slice(i * size..(i + 1) * size)?;
            Matrix::as_stored(shape.ty, shape.n, shape.k, bytes)
        };
        (0..shape.count).map(|i| matrix(i).ok_or_else(unfit)).collect()
    }

    /// Bytes that stay as they are in the file, locked if that is wanted.
    fn kept(&self, data: TensorBytes) -> Result<TensorBytes, DeviceError> {
        match self.weights.lock {
            true => data.locked().map_err(|e| DeviceError::Failed(e.to_string())),
            false => Ok(data),
        }
    }

    /// What a weight that stays as in the file takes. Pages of a mapped file are the system's, which can drop and
    /// reread them; what is joined from several tensors or computed is a copy.
    fn stored_bytes(&self, decl: &WeightDecl) -> Option<usize> {
        let in_file = decl.tensors.len() == 1 && decl.map == WeightMap::None;
        if self.weights.mmap && !self.weights.lock && in_file { Some(0) } else { decl.bytes() }
    }
}

/// `count` matrices of `n` rows of `k` numbers.
#[derive(Clone, Copy)]
struct Shape {
    ty: BlockType,
    count: usize,
    n: usize,
    k: usize,
}

impl Shape {
    fn of(decl: &WeightDecl) -> Option<Shape> {
        let (count, n, k) = match decl.shape[..] {
            [n, k] => (1, n, k),
            [count, n, k] => (count, n, k),
            _ => return None,
        };
        Some(Shape { ty: decl.ty, count, n, k })
    }
}

pub(crate) fn out_of_memory(bytes: usize, what: &str) -> DeviceError {
    DeviceError::OutOfMemory { bytes, what: what.to_string() }
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
            WeightUse::Rows => self.stored_bytes(decl)?,
            WeightUse::Vector => decl.shape.iter().product::<usize>().checked_mul(4)?,
            WeightUse::Matrix | WeightUse::Experts | WeightUse::Heads => {
                let Shape { ty, count, n, k } = Shape::of(decl)?;
                match self.weights.repack {
                    true => PackedMatrix::packed_bytes(ty, n, k)?.checked_mul(count)?,
                    false => self.stored_bytes(decl)?,
                }
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
            WeightUse::Rows => CpuWeight::Rows { ty: decl.ty, bytes: self.kept(data)? },
            WeightUse::Vector => {
                let mut numbers = vec![0.0; decl.shape.iter().product()];
                decode_row(decl.ty, &data, &mut numbers).map_err(|e| DeviceError::Failed(e.to_string()))?;
                CpuWeight::Vector(numbers)
            }
            WeightUse::Experts | WeightUse::Heads => CpuWeight::Stack(self.matrices(decl, data)?),
            WeightUse::Matrix => {
                let matrix = self.matrices(decl, data)?.pop();
                CpuWeight::Matrix(
                    matrix.ok_or_else(|| DeviceError::Failed(format!("'{}' is empty", decl.name)))?,
                )
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
