//! Operands of nodes on paged state: what its parts must be, and the tables that lead to its pages.

use super::Operands;
use crate::payload::{Attend, AttendBlocks, IndexSelect, PoolGated, PoolKeys};
use crate::state::{PAGE, PagedPart, StateKind};
use crate::types::{DType, Dim, ValueType};

impl Operands<'_> {
    /// Widths of the parts of paged state, K and V first.
    pub(super) fn paged(&self) -> Result<Vec<usize>, String> {
        self.parts(2, "needs paged state with K and V").map(|p| p.iter().map(|p| p.width).collect())
    }

    /// Widths of the parts of paged state.
    pub(super) fn widths(&self) -> Result<Vec<usize>, String> {
        self.parts(1, "needs paged state").map(|p| p.iter().map(|p| p.width).collect())
    }

    /// The parts of paged state, which are at least so many.
    pub(super) fn parts(&self, least: usize, needs: &str) -> Result<&[PagedPart], String> {
        let parts = match self.state.map(|s| &s.kind) {
            Some(StateKind::Paged { parts }) if parts.len() >= least => parts,
            _ => return Err(needs.to_string()),
        };
        match parts.iter().find(|p| !PagedPart::fits(p.every)) {
            None => Ok(parts),
            Some(p) => Err(format!("rows for every {} positions do not fit pages of {PAGE}", p.every)),
        }
    }

    /// Fails unless each of these parts of paged state has a row for every so many positions.
    pub(super) fn rows_for(&self, parts: &[usize], every: usize) -> Result<(), String> {
        let found = self.parts(1, "needs paged state")?;
        let every_of = |part: &usize| found.get(*part).map(|p| p.every);
        match parts.iter().find(|part| every_of(part) != Some(every)) {
            None => Ok(()),
            Some(part) => Err(format!("part {part} of the state has no row for every {every} positions")),
        }
    }

    /// Rows for the first parts of the state, then slots.
    pub(crate) fn store_kv(&self) -> Result<Vec<ValueType>, String> {
        let widths = self.paged()?;
        let Some(rows) = self.inputs.len().checked_sub(1).filter(|n| (2..=widths.len()).contains(n)) else {
            return Err(format!("takes rows for 2 to {} parts and slots, got {}", widths.len(), self.list()));
        };
        let slots = self.indices(rows)?;
        for (i, &width) in widths.iter().enumerate().take(rows) {
            let x = self.float(i)?;
            self.same_lead(&[x.shape.lead, slots])?;
            if x.shape.width() != width {
                return Err(format!("rows {} do not fit state of widths {widths:?}", self.list()));
            }
        }
        self.rows_for(&(0..rows).collect::<Vec<_>>(), 1)?;
        Ok(vec![])
    }

    pub(crate) fn attend(&self, a: &Attend) -> Result<Vec<ValueType>, String> {
        let q = self.float(0)?;
        self.same_lead(&[q.shape.lead, self.indices(1)?, self.indices(2)?])?;
        if !matches!(self.indices(3)?, Dim::Const(_)) {
            return Err(format!("the page table {} must have a constant capacity", self.inputs[3]));
        }
        let widths = self.paged()?;
        let Some((kw, vw)) = widths.first().copied().zip(widths.get(a.v_part).copied()) else {
            return Err(format!("values in part {} of state of widths {widths:?}", a.v_part));
        };
        let grouped = a.kv_heads > 0
            && a.heads.is_multiple_of(a.kv_heads)
            && kw.is_multiple_of(a.kv_heads)
            && vw.is_multiple_of(a.kv_heads)
            && q.shape.width() == a.heads * (kw / a.kv_heads);
        if !grouped {
            let (h, kv) = (a.heads, a.kv_heads);
            return Err(format!("{q} as {h} heads over {kv} KV heads of state widths {kw} and {vw}"));
        }
        self.rows_for(&[0, a.v_part], 1)?;
        Ok(vec![ValueType::f32(q.shape.lead, [a.heads * (vw / a.kv_heads)])])
    }

    pub(crate) fn attend_blocks(&self, a: &AttendBlocks) -> Result<Vec<ValueType>, String> {
        let blocks = self.inputs[4];
        if blocks.dtype != DType::I32 || blocks.shape.inner.len() != 1 || a.block == 0 {
            return Err(format!("input 4 is {blocks}, not i32 block ids per row (blocks of {})", a.block));
        }
        self.same_lead(&[self.inputs[0].shape.lead, blocks.shape.lead])?;
        self.attend(&a.attend)
    }

    /// Positions, page list starts and page lists, from input `first` on.
    pub(super) fn page_tables(&self, lead: Dim, first: usize) -> Result<(), String> {
        self.same_lead(&[lead, self.indices(first)?, self.indices(first + 1)?])?;
        match self.indices(first + 2)? {
            Dim::Const(_) => Ok(()),
            _ => Err(format!("the page table {} must have a constant capacity", self.inputs[first + 2])),
        }
    }

    pub(crate) fn pool_keys(&self, p: &PoolKeys) -> Result<Vec<ValueType>, String> {
        let slots = self.indices(3)?;
        self.page_tables(slots, 0)?;
        let widths = self.paged()?;
        let fits = |part: usize| widths.get(part).copied();
        match (fits(p.raw), fits(p.pooled)) {
            (Some(a), Some(b)) if a == b && p.block > 0 && 2 * p.inv_freq.len() <= a => {
                self.weight_is(&[a])?;
                self.rows_for(&[p.raw], 1)?;
                self.rows_for(&[p.pooled], p.block)?;
                Ok(vec![])
            }
            _ => Err(format!("parts {} and {} of state of widths {widths:?}", p.raw, p.pooled)),
        }
    }

    pub(crate) fn pool_gated(&self, p: &PoolGated) -> Result<Vec<ValueType>, String> {
        let slots = self.indices(3)?;
        self.page_tables(slots, 0)?;
        let widths = self.paged()?;
        let [raw, gates, pooled] = [p.raw, p.gates, p.pooled].map(|part| widths.get(part).copied());
        match raw {
            Some(width) if gates == raw && pooled == raw && p.block > 0 && p.pooled != p.raw => {
                self.weight_is(&[p.block * width])?;
                self.rows_for(&[p.raw, p.gates], 1)?;
                self.rows_for(&[p.pooled], p.block)?;
                Ok(vec![])
            }
            _ => Err(format!("{p:?} over state of widths {widths:?}")),
        }
    }

    pub(crate) fn index_select(&self, s: &IndexSelect) -> Result<Vec<ValueType>, String> {
        let q = self.float(0)?;
        self.page_tables(q.shape.lead, 1)?;
        let widths = self.paged()?;
        if s.weighted && *self.float(4)? != ValueType::f32(q.shape.lead, [s.heads]) {
            return Err(format!("{} as weights of {} heads", self.inputs[4], s.heads));
        }
        match widths.get(s.pooled) {
            Some(&d) if s.block > 0 && s.top > 0 && q.shape.width() == s.heads * d => {
                self.rows_for(&[s.pooled], s.block)?;
                Ok(vec![ValueType::i32(q.shape.lead, [s.top])])
            }
            _ => {
                Err(format!("{q} as {} heads over part {} of state of widths {widths:?}", s.heads, s.pooled))
            }
        }
    }
}
