//! Weights in this device's memory: in which form each is kept, and where packed ones lie.
//!
//! In: the bytes of a tensor as they stand in a file. Out: a [`CpuWeight`]. Packing in parallel is `device`'s, the
//! layout is `pack`'s, products are `program::products`'.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use minfer_format::bytes::AlignedBuf;
use minfer_format::{BlockType, TensorBytes};
use minfer_runtime::DeviceError;

use crate::device::out_of_memory;
use crate::matmul::{Job, MatmulFn};
use crate::pack::{AlignedBytes, GROUP, PackedMatrix, Region, group_bytes, pack_into};

/// A weight in this device's memory.
pub(crate) enum CpuWeight {
    /// In the file's order, for looking up rows: usually pages of the mapped file.
    Rows { ty: BlockType, bytes: TensorBytes },
    /// Decoded numbers.
    Vector(Vec<f32>),
    /// For products.
    Matrix(Matrix),
    /// One matrix per expert or head.
    Stack(Vec<Matrix>),
}

/// A matrix for products.
pub(crate) enum Matrix {
    /// In the kernels' layout.
    Packed(PackedMatrix),
    /// As in the file; groups are packed whenever they are needed.
    AsStored(Stored),
}

/// A matrix in the file's layout; the shape has been found to fit the bytes and the type.
pub(crate) struct Stored {
    ty: BlockType,
    n: usize,
    k: usize,
    bytes: TensorBytes,
    group_bytes: usize,
}

impl Matrix {
    /// `None` where shape, type and number of bytes do not fit together.
    pub(crate) fn as_stored(ty: BlockType, n: usize, k: usize, bytes: TensorBytes) -> Option<Matrix> {
        let group_bytes = group_bytes(ty, k)?;
        let fits = ty.row_bytes(k)?.checked_mul(n)? == bytes.len();
        fits.then_some(Matrix::AsStored(Stored { ty, n, k, bytes, group_bytes }))
    }

    pub(crate) fn ty(&self) -> BlockType {
        match self {
            Matrix::Packed(m) => m.ty(),
            Matrix::AsStored(m) => m.ty,
        }
    }

    /// Output rows.
    pub(crate) fn n(&self) -> usize {
        match self {
            Matrix::Packed(m) => m.n(),
            Matrix::AsStored(m) => m.n,
        }
    }

    /// Numbers in a row.
    pub(crate) fn k(&self) -> usize {
        match self {
            Matrix::Packed(m) => m.k(),
            Matrix::AsStored(m) => m.k,
        }
    }

    /// Groups of [`GROUP`] output rows.
    pub(crate) fn groups(&self) -> usize {
        self.n().div_ceil(GROUP)
    }

    /// Bytes of a group in the kernels' layout.
    pub(crate) fn group_bytes(&self) -> usize {
        match self {
            Matrix::Packed(m) => m.bytes().len() / m.groups().max(1),
            Matrix::AsStored(m) => m.group_bytes,
        }
    }

    /// Runs a kernel on some groups; `job.weights` is filled in here. Packed in memory or on the way, the kernel sees
    /// the same bytes.
    ///
    /// # Errors
    /// No memory for packing on the way.
    ///
    /// # Safety
    /// As [`MatmulFn`], for a job of this matrix.
    pub(crate) unsafe fn product(
        &self,
        kernel: MatmulFn,
        job: &Job<'_>,
        groups: Range<usize>,
        scratch: &mut PackScratch,
    ) -> Result<(), String> {
        match self {
            Matrix::Packed(m) => {
                let job = Job { weights: m.bytes().as_ptr(), ..*job };
                // SAFETY: by the caller's promise.
                unsafe { kernel(&job, groups) }
            }
            Matrix::AsStored(m) => {
                let packed = scratch.pack(m, groups.clone())?;
                // To the kernel these groups are a whole matrix, whose outputs begin in the middle of a row.
                let first = GROUP * groups.start;
                let job = Job {
                    n: (m.n - first).min(GROUP * groups.len()),
                    weights: packed.as_ptr(),
                    y: job.y.wrapping_add(first),
                    ..*job
                };
                // SAFETY: by the caller's promise; the groups have been packed for this type.
                unsafe { kernel(&job, 0..groups.len()) }
            }
        }
        Ok(())
    }
}

/// A worker's memory for groups that are packed on the way; it grows to the largest range.
#[derive(Default)]
pub(crate) struct PackScratch(Option<AlignedBytes>);

impl PackScratch {
    fn pack(&mut self, m: &Stored, groups: Range<usize>) -> Result<&[u8], String> {
        let bytes = m.group_bytes * groups.len();
        if self.0.as_ref().is_none_or(|b| b.as_slice().len() < bytes) {
            self.0 = AlignedBytes::zeroed(bytes);
        }
        let Some(memory) = &mut self.0 else {
            return Err(out_of_memory(bytes, "packing weights on the way").to_string());
        };
        let out = &mut memory.as_mut_slice()[..bytes];
        pack_into(m.ty, m.n, m.k, &m.bytes, groups, out).map_err(|e| e.to_string())?;
        Ok(out)
    }
}

/// Where packed weights lie: several to a region of huge pages.
pub(crate) struct WeightMemory {
    lock: bool,
    /// The region that is being filled, and how far it is. It belongs to the weights in it.
    filling: Mutex<(Weak<Region>, usize)>,
}

impl WeightMemory {
    pub(crate) fn new(lock: bool) -> WeightMemory {
        WeightMemory { lock, filling: Mutex::new((Weak::new(), 0)) }
    }

    /// `len` zero bytes, aligned to 64.
    ///
    /// # Errors
    /// Memory is refused, or cannot be locked.
    pub(crate) fn take(&self, len: usize) -> Result<AlignedBytes, DeviceError> {
        // Huge pages need regions far larger than the small tensors. All of a locked one takes memory.
        let shared: usize = if self.lock { 8 << 20 } else { 32 << 20 };
        let refused = || out_of_memory(len, WHAT);
        if len > shared / 4 {
            // SAFETY: the region is new.
            return unsafe { self.region(len)?.part(0, len) }.ok_or_else(refused);
        }
        let mut filling = self.filling.lock().unwrap_or_else(PoisonError::into_inner);
        let (region, at) = (filling.0.upgrade(), filling.1);
        // SAFETY: what follows `at` has not been handed out, and the lock is held.
        if let Some(part) = region.and_then(|region| unsafe { region.part(at, len) }) {
            filling.1 = (at + len).next_multiple_of(64);
            return Ok(part);
        }
        let region = self.region(shared)?;
        *filling = (Arc::downgrade(&region), len.next_multiple_of(64));
        // SAFETY: the region is new.
        unsafe { region.part(0, len) }.ok_or_else(refused)
    }

    fn region(&self, len: usize) -> Result<Arc<Region>, DeviceError> {
        let memory = AlignedBuf::pages(len).ok_or_else(|| out_of_memory(len, WHAT))?;
        memory.prefer_huge_pages();
        if self.lock {
            memory.lock().map_err(|e| DeviceError::Failed(e.to_string()))?;
        }
        Ok(Arc::new(Region::new(memory)))
    }
}

const WHAT: &str = "packed weights";

#[cfg(test)]
mod tests {
    use minfer_format::synth;

    use super::*;
    use crate::Isa;
    use crate::matmul::{Rows, select, x_row_bytes};
    use crate::quantize;
    use crate::testing::Rng;

    const N: usize = 3 * GROUP + 5;
    const ROWS: usize = 3;

    /// Outputs of all groups, `step` at a time.
    fn outputs(matrix: &Matrix, isa: Isa, x: &[u32], step: usize) -> Vec<u32> {
        let mut y = vec![0.0f32; ROWS * N];
        let job = Job {
            k: matrix.k(),
            n: N,
            weights: std::ptr::null(),
            x: x.as_ptr().cast(),
            x_stride: x_row_bytes(matrix.ty(), matrix.k()),
            y: y.as_mut_ptr(),
            y_stride: 4 * N,
            rows: Rows::All(ROWS),
        };
        let (kernel, mut scratch) = (select(matrix.ty(), isa), PackScratch::default());
        for start in (0..matrix.groups()).step_by(step) {
            let groups = start..(start + step).min(matrix.groups());
            // SAFETY: the sizes are those of the matrix, and the instruction set is available.
            unsafe { matrix.product(kernel, &job, groups, &mut scratch) }.unwrap();
        }
        y.iter().map(|y| y.to_bits()).collect()
    }

    /// Reference: the same product from packed memory. Tolerance: none, for every type and instruction set.
    #[test]
    fn packing_on_the_way_changes_no_bit() {
        for ty in BlockType::all() {
            let k = 3 * ty.block_len().max(32);
            let mut raw = vec![0; N * ty.row_bytes(k).unwrap()];
            synth::fill_random(ty, 3, 0.1, &mut raw);
            let mut x = vec![0u32; ROWS * x_row_bytes(ty, k) / 4];
            for (i, row) in bytemuck::cast_slice_mut(&mut x).chunks_exact_mut(x_row_bytes(ty, k)).enumerate()
            {
                let numbers = Rng::new(i as u64).floats(k, 1.0);
                match ty.is_quantized() {
                    true => quantize::row(&numbers, row),
                    false => row.copy_from_slice(bytemuck::cast_slice(&numbers)),
                }
            }
            let packed = Matrix::Packed(PackedMatrix::pack(ty, N, k, &raw).unwrap());
            let stored = Matrix::as_stored(ty, N, k, AlignedBuf::from(&raw[..]).into()).unwrap();
            assert_eq!(packed.group_bytes(), stored.group_bytes());
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                let want = outputs(&packed, isa, &x, 4);
                assert!(want.iter().any(|&bits| bits != 0));
                for step in [1, 3] {
                    assert_eq!(outputs(&stored, isa, &x, step), want, "{ty}, {}, {step}", isa.name());
                }
            }
            let short = AlignedBuf::from(&raw[1..]).into();
            assert!(Matrix::as_stored(ty, N, k, short).is_none());
        }
    }

    #[test]
    fn parts_of_regions_are_apart_and_go_with_their_weights() {
        let memory = WeightMemory::new(false);
        let mut parts: Vec<AlignedBytes> =
            [100, 1, 64, 0, 3 << 20, 40 << 20].map(|len| memory.take(len).unwrap()).into();
        for (i, part) in parts.iter_mut().enumerate() {
            assert!(part.as_slice().as_ptr().addr().is_multiple_of(64));
            assert!(part.as_slice().iter().all(|&b| b == 0), "part {i} is new");
            part.as_mut_slice().fill(i as u8 + 1);
        }
        for (i, part) in parts.iter().enumerate() {
            assert!(part.as_slice().iter().all(|&b| b == i as u8 + 1), "part {i} is its own");
        }
        assert_eq!(memory.filling.lock().unwrap().0.strong_count(), 5, "small ones share a region");
        drop(parts);
        assert_eq!(memory.filling.lock().unwrap().0.strong_count(), 0, "it went with the last of them");
        assert!(memory.take(10).unwrap().as_slice().iter().all(|&b| b == 0));
    }
}
