//! Operands of compression, of attention over windows and compressed rows, and of their routing.

use super::Operands;
use crate::compressed::{AttendWindow, Compress, RoundFormat, RoundTrip, StorePart};
use crate::types::{DType, ValueType};

impl Operands<'_> {
    pub(crate) fn compress(&self, c: &Compress) -> Result<Vec<ValueType>, String> {
        let (kv, gate) = (self.float(0)?, self.float(1)?);
        let width = kv.shape.width();
        self.same_lead(&[kv.shape.lead, gate.shape.lead, self.indices(2)?])?;
        self.state_slots(kv.shape.lead, 3)?;
        if c.ratio == 0 || width != gate.shape.width() || !width.is_multiple_of(c.parts()) {
            return Err(format!("{} for {c:?}", self.list()));
        }
        self.weight_is(&[c.ratio, width])?;
        self.recurrent(c.tail() * 2 * width)?;
        Ok(vec![ValueType::f32(kv.shape.lead, [width / c.parts()])])
    }

    pub(crate) fn window_start(&self, ratio: usize) -> Result<Vec<ValueType>, String> {
        let lead = self.indices(0)?;
        if ratio == 0 {
            Err("windows of no positions".to_string())
        } else {
            Ok(vec![ValueType::i32(lead, [])])
        }
    }

    pub(crate) fn zero_first(&self) -> Result<Vec<ValueType>, String> {
        let x = self.float(0)?;
        self.same_lead(&[x.shape.lead, self.indices(1)?])?;
        Ok(vec![x.clone()])
    }

    pub(crate) fn store_part(&self, s: &StorePart) -> Result<Vec<ValueType>, String> {
        let x = self.float(0)?;
        self.same_lead(&[x.shape.lead, self.indices(1)?, self.indices(2)?])?;
        let widths = self.widths()?;
        match widths.get(s.part) {
            Some(&width) if width == x.shape.width() && s.every > 0 => {
                self.rows_for(&[s.part], s.every)?;
                Ok(vec![])
            }
            _ => Err(format!("{x} as part {} of state of widths {widths:?}", s.part)),
        }
    }

    pub(crate) fn round_trip(&self, r: &RoundTrip) -> Result<Vec<ValueType>, String> {
        let x = self.float(0)?;
        let whole = |len: usize, block: usize| block > 0 && len > 0 && len.is_multiple_of(block);
        let fits = match r.format {
            RoundFormat::Fp8 { block, from, len } => {
                whole(len, block) && from.checked_add(len).is_some_and(|end| end <= r.group)
            }
            RoundFormat::Fp4Hadamard { block } => r.group.is_power_of_two() && whole(r.group, block),
        };
        if fits && whole(x.shape.last(), r.group) {
            return Ok(vec![x.clone()]);
        }
        Err(format!("{x} does not fit {r:?}"))
    }

    pub(crate) fn attend_window(&self, a: &AttendWindow) -> Result<Vec<ValueType>, String> {
        let count = self.inputs.len();
        if !(5..=6).contains(&count) {
            return Err(format!("takes 5 or 6 inputs, got {count}"));
        }
        let q = self.float(0)?;
        self.page_tables(q.shape.lead, 1)?;
        if self.inputs[4] != self.inputs[3] {
            return Err(format!("page tables {} and {} differ", self.inputs[3], self.inputs[4]));
        }
        match self.inputs[5..] {
            [] => {}
            [ids] if ids.dtype == DType::I32 && ids.shape.inner.len() == 1 && a.ratio > 0 => {
                self.same_lead(&[q.shape.lead, ids.shape.lead])?;
            }
            _ => return Err(format!("{} is not a list of compressed rows per row", self.inputs[5])),
        }
        self.weight_is(&[a.attend.heads])?;
        let widths = self.widths()?;
        let fits = a.attend.kv_heads == 1
            && a.window > 0
            && q.shape.width() == a.attend.heads * widths[0]
            && (a.ratio == 0 || widths.get(1) == Some(&widths[0]));
        if !fits {
            return Err(format!("{q} over state of widths {widths:?} for {a:?}"));
        }
        self.rows_for(&[0], 1)?;
        if a.ratio > 0 {
            self.rows_for(&[1], a.ratio)?;
        }
        Ok(vec![ValueType::f32(q.shape.lead, [q.shape.width()])])
    }

    pub(crate) fn gather_ids(&self) -> Result<Vec<ValueType>, String> {
        let (lead, w) = (self.indices(0)?, self.weight()?);
        match w.shape[..] {
            [_, k] => Ok(vec![ValueType::i32(lead, [k])]),
            _ => Err(format!("weight '{}' has shape {:?}, expected [vocab, ids]", w.name, w.shape)),
        }
    }

    pub(crate) fn expert_weights(&self) -> Result<Vec<ValueType>, String> {
        let (x, ids) = (self.float(0)?, self.inputs[1]);
        self.same_lead(&[x.shape.lead, ids.shape.lead])?;
        if ids.dtype != DType::I32 || ids.shape.inner.len() != 1 {
            return Err(format!("input 1 is {ids}, not i32 expert ids per row"));
        }
        Ok(vec![ValueType::f32(x.shape.lead, ids.shape.inner.clone())])
    }
}
