//! The arithmetic of the test devices: one plain scalar definition per operation, over bytes of an arena.

use std::sync::{Arc, Mutex};

use minfer_graph::{Attend, Bind, Dim, Norm, Op, PAGE, StateKind, ValueId};
use minfer_runtime::{DeviceError, ProgramSpec, Region, StateSpec};

/// Whether the test devices can compute an operation at all.
pub fn implements(op: &Op) -> bool {
    matches!(
        op,
        Op::Embed
            | Op::RmsNorm(_)
            | Op::MatMul
            | Op::BiasAdd
            | Op::Add
            | Op::Mul
            | Op::Silu
            | Op::StoreKv
            | Op::Attend(_)
            | Op::GatherRows
            | Op::ArgMax
            | Op::SwiGlu
            | Op::AddRmsNorm(_)
    )
}

/// K and V of one layer: rows of `widths[part]` numbers at `page * PAGE + offset`.
pub struct Rows {
    pub widths: [usize; 2],
    pub parts: Mutex<[Vec<f32>; 2]>,
}

impl Rows {
    pub fn new(spec: &StateSpec) -> Rows {
        let StateKind::Paged { widths } = &spec.decl.kind else { panic!("only paged state") };
        let rows = |width: usize| vec![f32::NAN; width * PAGE * spec.pages];
        Rows { widths: [widths[0], widths[1]], parts: Mutex::new([rows(widths[0]), rows(widths[1])]) }
    }

    pub fn copy_page(&self, from: usize, to: usize) {
        let mut parts = self.parts.lock().unwrap();
        for (part, width) in parts.iter_mut().zip(self.widths) {
            let page = PAGE * width;
            part.copy_within(from * page..(from + 1) * page, to * page);
        }
    }

    /// The first rows of a page, part by part.
    pub fn read(&self, page: usize, rows: usize) -> Vec<u8> {
        let parts = self.parts.lock().unwrap();
        let part = |(part, width): (&Vec<f32>, usize)| part[page * PAGE * width..][..rows * width].to_vec();
        parts.iter().zip(self.widths).flat_map(part).flat_map(f32::to_le_bytes).collect()
    }

    pub fn write(&self, page: usize, rows: usize, bytes: &[u8]) {
        let mut parts = self.parts.lock().unwrap();
        let mut numbers = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        for (part, width) in parts.iter_mut().zip(self.widths) {
            part[page * PAGE * width..][..rows * width].fill_with(|| numbers.next().unwrap());
        }
    }
}

/// Where a value lies, and its numbers per row.
struct Operand {
    region: Region,
    lead: Dim,
    width: usize,
}

impl Operand {
    fn len(&self, bind: &Bind) -> usize {
        bind.len(self.lead) * self.width
    }

    fn bytes<'a>(&self, arena: &'a [u8], bind: &Bind) -> &'a [u8] {
        let len = 4 * self.len(bind);
        assert!(len <= self.region.bytes, "a region of {} bytes for {len}", self.region.bytes);
        &arena[self.region.offset..self.region.offset + len]
    }

    fn f32(&self, arena: &[u8], bind: &Bind) -> Vec<f32> {
        self.bytes(arena, bind).chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
    }

    fn i32(&self, arena: &[u8], bind: &Bind) -> Vec<i32> {
        self.bytes(arena, bind).chunks_exact(4).map(|c| i32::from_le_bytes(c.try_into().unwrap())).collect()
    }

    fn put(&self, arena: &mut [u8], bind: &Bind, numbers: impl Iterator<Item = [u8; 4]>) {
        let bytes: Vec<u8> = numbers.flatten().collect();
        assert_eq!(bytes.len(), 4 * self.len(bind));
        assert!(bytes.len() <= self.region.bytes);
        arena[self.region.offset..self.region.offset + bytes.len()].copy_from_slice(&bytes);
    }
}

/// A node with its operands resolved.
pub struct Step {
    op: Op,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
    weight: Option<Arc<Vec<f32>>>,
    state: Option<Arc<Rows>>,
}

impl Step {
    /// Resolves the nodes of a split. `weight` and `state` unwrap the device's own handles.
    pub fn compile(
        spec: &ProgramSpec<'_>,
        weight: impl Fn(&ProgramSpec<'_>, usize) -> Result<Option<Arc<Vec<f32>>>, DeviceError>,
        state: impl Fn(&ProgramSpec<'_>, usize) -> Result<Option<Arc<Rows>>, DeviceError>,
    ) -> Result<Vec<Step>, DeviceError> {
        let operand = |v: &ValueId| -> Result<Operand, DeviceError> {
            let missing = || DeviceError::Unsupported(format!("value {} has no region", v.0));
            let shape = &spec.graph.ty(*v).shape;
            Ok(Operand {
                region: (spec.region)(*v).ok_or_else(missing)?,
                lead: shape.lead,
                width: shape.width(),
            })
        };
        spec.nodes
            .iter()
            .map(|id| {
                let node = &spec.graph.nodes[id.index()];
                Ok(Step {
                    op: node.op.clone(),
                    inputs: node.inputs.iter().map(operand).collect::<Result<_, _>>()?,
                    outputs: node.outputs.iter().map(operand).collect::<Result<_, _>>()?,
                    weight: weight(spec, id.index())?,
                    state: state(spec, id.index())?,
                })
            })
            .collect()
    }

    /// Computes the node in `arena`.
    pub fn run(&self, arena: &mut [u8], bind: &Bind) {
        let weight = self.weight.as_deref().map(Vec::as_slice).unwrap_or_default();
        let f = |i: usize| self.inputs[i].f32(arena, bind);
        let ints = |i: usize| self.inputs[i].i32(arena, bind);
        match &self.op {
            Op::StoreKv => self.store_kv(&f(0), &f(1), &ints(2)),
            Op::ArgMax => {
                let best = f(0).chunks(self.inputs[0].width).map(argmax).collect::<Vec<_>>();
                self.outputs[0].put(arena, bind, best.into_iter().map(i32::to_le_bytes));
            }
            Op::AddRmsNorm(norm) => {
                let sum = zip(&f(0), &f(1), |a, b| a + b);
                let normed = rms_norm(&sum, weight, norm);
                self.put(arena, bind, 0, &sum);
                self.put(arena, bind, 1, &normed);
            }
            op => {
                let out = match op {
                    Op::Embed => rows(weight, &ints(0), self.outputs[0].width),
                    Op::GatherRows => rows(&f(0), &ints(1), self.outputs[0].width),
                    Op::RmsNorm(norm) => rms_norm(&f(0), weight, norm),
                    Op::MatMul => matmul(&f(0), weight, self.inputs[0].width),
                    Op::BiasAdd => {
                        f(0).chunks(weight.len()).flat_map(|row| zip(row, weight, |a, b| a + b)).collect()
                    }
                    Op::Add => zip(&f(0), &f(1), |a, b| a + b),
                    Op::Mul => zip(&f(0), &f(1), |a, b| a * b),
                    Op::Silu => f(0).into_iter().map(silu).collect(),
                    Op::SwiGlu => zip(&f(0), &f(1), |gate, up| silu(gate) * up),
                    Op::Attend(a) => self.attend(a, &f(0), [&ints(1), &ints(2), &ints(3)]),
                    other => panic!("the test devices do not compute {}", other.name()),
                };
                self.put(arena, bind, 0, &out);
            }
        }
    }

    fn put(&self, arena: &mut [u8], bind: &Bind, output: usize, numbers: &[f32]) {
        self.outputs[output].put(arena, bind, numbers.iter().map(|x| x.to_le_bytes()));
    }

    fn store_kv(&self, k: &[f32], v: &[f32], slots: &[i32]) {
        let state = self.state.as_ref().unwrap();
        let mut parts = state.parts.lock().unwrap();
        for (part, (new, width)) in parts.iter_mut().zip([k, v].into_iter().zip(state.widths)) {
            for (row, &slot) in new.chunks(width).zip(slots).filter(|(_, slot)| **slot >= 0) {
                part[slot as usize * width..][..width].copy_from_slice(row);
            }
        }
    }

    fn attend(&self, a: &Attend, q: &[f32], [positions, table_at, pages]: [&[i32]; 3]) -> Vec<f32> {
        let state = self.state.as_ref().unwrap();
        let parts = state.parts.lock().unwrap();
        let [kd, vd] = state.widths.map(|w| w / a.kv_heads);
        let mut out = Vec::new();
        for (row, q) in q.chunks(a.heads * kd).enumerate() {
            let slot = |j: usize| pages[table_at[row] as usize + j / PAGE] as usize * PAGE + j % PAGE;
            for (head, q) in q.chunks(kd).enumerate() {
                let kv = head / (a.heads / a.kv_heads);
                let key = |j: usize| &parts[0][slot(j) * state.widths[0] + kv * kd..][..kd];
                let value = |j: usize| &parts[1][slot(j) * state.widths[1] + kv * vd..][..vd];
                let past = 0..=positions[row] as usize;
                let scores: Vec<f32> =
                    past.map(|j| a.scale * q.iter().zip(key(j)).map(|(a, b)| a * b).sum::<f32>()).collect();
                let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let weights: Vec<f32> = scores.iter().map(|s| (s - top).exp()).collect();
                let sum: f32 = weights.iter().sum();
                out.extend(
                    (0..vd)
                        .map(|i| weights.iter().enumerate().map(|(j, w)| w * value(j)[i]).sum::<f32>() / sum),
                );
            }
        }
        out
    }
}

fn zip(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> Vec<f32> {
    a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect()
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

fn rms_norm(x: &[f32], weight: &[f32], norm: &Norm) -> Vec<f32> {
    x.chunks(norm.group)
        .flat_map(|group| {
            let mean = group.iter().map(|x| x * x).sum::<f32>() / norm.group as f32;
            let scale = 1.0 / (mean + norm.eps).sqrt();
            zip(group, weight, |x, w| x * scale * w)
        })
        .collect()
}

fn matmul(x: &[f32], weight: &[f32], k: usize) -> Vec<f32> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    x.chunks(k).flat_map(|row| weight.chunks(k).map(move |w| dot(row, w))).collect()
}

fn rows(table: &[f32], ids: &[i32], width: usize) -> Vec<f32> {
    ids.iter().flat_map(|&id| table[id as usize * width..][..width].iter().copied()).collect()
}

fn argmax(row: &[f32]) -> i32 {
    (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as i32
}
