//! Which pages hold the rows of a sequence's positions: all of them, or the last ones.

use minfer_graph::PAGE;

use crate::error::EngineError;
use crate::pages::PagePool;

/// A page whose content must be copied before the sequence writes to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageCopy {
    pub(crate) from: u32,
    pub(crate) to: u32,
}

/// Pages in the order of positions.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockTable {
    /// Pages before the first one that is held.
    first: usize,
    pages: Vec<u32>,
}

impl BlockTable {
    /// The page of the positions from `index * PAGE` on.
    pub(crate) fn page(&self, index: usize) -> Option<u32> {
        self.pages.get(index.checked_sub(self.first)?).copied()
    }

    pub(crate) fn pages(&self) -> impl Iterator<Item = u32> {
        self.pages.iter().copied()
    }

    /// Pages up to the last one, those before the first counted in.
    pub(crate) fn end(&self) -> usize {
        self.first + self.pages.len()
    }

    /// The slot of a position whose page is held; else -1, to which nothing is written.
    pub(crate) fn slot(&self, position: usize) -> i32 {
        self.page(position / PAGE).map_or(-1, |page| (page as usize * PAGE + position % PAGE) as i32)
    }

    /// Pages that `add` positions after the first `len` take from the pool, the copy of a shared last page
    /// included.
    pub(crate) fn needed(&self, len: usize, add: usize, pool: &PagePool) -> usize {
        // Rows of a draft head may have taken pages ahead already.
        let held = if self.pages.is_empty() { len / PAGE } else { self.end() };
        let new = (len + add).div_ceil(PAGE).saturating_sub(held);
        new + usize::from(add > 0 && self.shared_tail(len, pool).is_some())
    }

    /// The page that position `len` lies in, if it is held and others refer to it too.
    fn shared_tail(&self, len: usize, pool: &PagePool) -> Option<u32> {
        self.page(len / PAGE).filter(|&tail| pool.is_shared(tail))
    }

    /// Makes room for `add` positions after the first `len`. A shared page that they will be written to is
    /// replaced by a page of its own, whose content the caller copies.
    pub(crate) fn reserve(
        &mut self,
        len: usize,
        add: usize,
        pool: &mut PagePool,
    ) -> Result<Option<PageCopy>, EngineError> {
        pool.check(self.needed(len, add, pool))?;
        if self.pages.is_empty() {
            self.first = len / PAGE;
        }
        let mut copy = None;
        if let Some(from) = self.shared_tail(len, pool).filter(|_| add > 0) {
            let to = pool.take()?;
            pool.release(from);
            self.pages[len / PAGE - self.first] = to;
            copy = Some(PageCopy { from, to });
        }
        while self.end() * PAGE < len + add {
            self.pages.push(pool.take()?);
        }
        Ok(copy)
    }

    /// Takes [`BlockTable::reserve`]'s replacement back, after a step that failed.
    pub(crate) fn undo_copy(&mut self, len: usize, copy: PageCopy, pool: &mut PagePool) {
        if self.page(len / PAGE) == Some(copy.to) {
            self.pages[len / PAGE - self.first] = copy.from;
            pool.share(copy.from);
            pool.release(copy.to);
        }
    }

    /// Gives back pages behind the first `len` positions.
    pub(crate) fn trim(&mut self, len: usize, pool: &mut PagePool) {
        let kept = len.div_ceil(PAGE).saturating_sub(self.first);
        self.pages.drain(kept.min(self.pages.len())..).for_each(|page| pool.release(page));
    }

    /// Gives back pages that only hold positions before `position`.
    pub(crate) fn retire(&mut self, position: usize, pool: &mut PagePool) {
        let gone = (position / PAGE).saturating_sub(self.first).min(self.pages.len());
        self.pages.drain(..gone).for_each(|page| pool.release(page));
        self.first += gone;
    }

    /// The pages of positions `from..to`, with one more user each.
    pub(crate) fn part(&self, from: usize, to: usize, pool: &mut PagePool) -> BlockTable {
        let first = (from / PAGE).max(self.first);
        let pages: Vec<u32> = (first..to.div_ceil(PAGE)).map_while(|index| self.page(index)).collect();
        pages.iter().for_each(|&page| pool.share(page));
        BlockTable { first, pages }
    }

    /// One more user of every page.
    pub(crate) fn share(&self, pool: &mut PagePool) {
        self.pages.iter().for_each(|&page| pool.share(page));
    }

    /// One user less of every page.
    pub(crate) fn release(self, pool: &mut PagePool) {
        self.pages.into_iter().for_each(|page| pool.release(page));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A window of 100 positions over a long sequence takes a few pages of any pool, and gives all back.
    #[test]
    fn windows_move_on() {
        let (mut pool, mut table, mut len) = (PagePool::new(40, 6), BlockTable::default(), 0usize);
        for add in [1, 63, 64, 130, 7, 200, 1, 1, 55] {
            table.retire(len.saturating_sub(100), &mut pool);
            assert_eq!(table.needed(len, add, &pool), {
                let before = pool.free();
                assert!(table.reserve(len, add, &mut pool).unwrap().is_none());
                before - pool.free()
            });
            len += add;
            let seen = len.saturating_sub(100)..len;
            assert!(seen.clone().all(|p| table.slot(p) >= 40 * PAGE as i32), "{len}");
            let distinct: std::collections::BTreeSet<i32> = seen.clone().map(|p| table.slot(p)).collect();
            assert_eq!(distinct.len(), seen.len());
        }
        assert_eq!(table.slot(0), -1, "the first page is gone");
        table.release(&mut pool);
        assert_eq!(pool.free(), 6);
    }

    /// What a checkpoint refers to stays when the sequence goes on, and is copied before it is written to.
    #[test]
    fn parts_are_shared() {
        let (mut pool, mut table) = (PagePool::new(0, 8), BlockTable::default());
        table.reserve(0, 200, &mut pool).unwrap();
        let kept = table.part(110, 180, &mut pool);
        assert_eq!((kept.page(0), kept.page(1)), (None, table.page(1)));
        assert_eq!(kept.end(), 3);
        let tail = table.page(3);
        assert!(table.reserve(200, 1, &mut pool).unwrap().is_none(), "the last page is not shared");
        table.retire(500, &mut pool);
        assert_eq!(pool.free(), 6, "two pages are left");
        let mut back = kept.clone();
        kept.share(&mut pool);
        back.trim(180, &mut pool);
        let copy = back.reserve(180, 1, &mut pool).unwrap().unwrap();
        assert_eq!((Some(copy.from), Some(copy.to)), (kept.page(2), back.page(2)));
        back.undo_copy(180, copy, &mut pool);
        assert_eq!((back.page(2), tail.is_some()), (kept.page(2), true));
        back.release(&mut pool);
        kept.release(&mut pool);
        table.release(&mut pool);
        assert_eq!(pool.free(), 8);
    }
}
