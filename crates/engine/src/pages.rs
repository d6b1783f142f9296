//! A pool of numbered units with reference counts: KV pages that block tables refer to, and slots of
//! recurrent state.

use crate::error::EngineError;
use minfer_graph::PAGE;

/// Reference counts of all pages. A page is free when nobody refers to it.
#[derive(Debug)]
pub(crate) struct PagePool {
    /// Number of the first page.
    first: u32,
    references: Vec<u32>,
    free: Vec<u32>,
}

impl PagePool {
    /// Pages `first..first + pages`.
    pub(crate) fn new(first: usize, pages: usize) -> PagePool {
        let first = first as u32;
        // Popped from the back: low numbers first, which keeps young caches compact.
        let free = (first..first + pages as u32).rev().collect();
        PagePool { first, references: vec![0; pages], free }
    }

    fn references(&mut self, page: u32) -> &mut u32 {
        &mut self.references[(page - self.first) as usize]
    }

    pub(crate) fn total(&self) -> usize {
        self.references.len()
    }

    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Fails with the numbers unless `needed` pages are free.
    pub(crate) fn check(&self, needed: usize) -> Result<(), EngineError> {
        if needed <= self.free() {
            return Ok(());
        }
        let (free, total) = (self.free(), self.references.len());
        Err(EngineError::OutOfPages { needed, free, total, page: PAGE })
    }

    /// A page for one user.
    pub(crate) fn take(&mut self) -> Result<u32, EngineError> {
        self.check(1)?;
        match self.free.pop() {
            Some(page) => {
                *self.references(page) = 1;
                Ok(page)
            }
            None => self.check(1).map(|()| 0),
        }
    }

    /// One more user of a page.
    pub(crate) fn share(&mut self, page: u32) {
        *self.references(page) += 1;
    }

    /// One user less.
    pub(crate) fn release(&mut self, page: u32) {
        let references = self.references(page);
        *references = references.saturating_sub(1);
        if *references == 0 {
            self.free.push(page);
        }
    }

    pub(crate) fn is_shared(&self, page: u32) -> bool {
        self.references[(page - self.first) as usize] > 1
    }
}
