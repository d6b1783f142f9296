//! Recently used rows in memory of a fixed size: the least recently used one gives way.

use std::collections::HashMap;

/// No slot.
const NONE: u32 = u32::MAX;

/// Slots in a ring of use, kept as a doubly linked list inside of one vector.
pub(super) struct Cache {
    row_bytes: usize,
    bytes: Vec<u8>,
    links: Vec<Link>,
    by_id: HashMap<i32, u32>,
    /// Most and least recently used slot.
    newest: u32,
    oldest: u32,
    capacity: usize,
}

#[derive(Clone, Copy)]
struct Link {
    id: i32,
    newer: u32,
    older: u32,
}

impl Cache {
    pub(super) fn new(row_bytes: usize, cache_bytes: usize) -> Cache {
        let capacity = (cache_bytes / row_bytes).min(NONE as usize - 1);
        Cache {
            row_bytes,
            bytes: Vec::new(),
            links: Vec::new(),
            by_id: HashMap::new(),
            newest: NONE,
            oldest: NONE,
            capacity,
        }
    }

    /// Copies a row out, if it is there.
    pub(super) fn get(&mut self, id: i32, out: &mut [u8]) -> bool {
        let Some(&slot) = self.by_id.get(&id) else { return false };
        out.copy_from_slice(&self.bytes[self.range(slot)]);
        self.unlink(slot);
        self.push_newest(slot);
        true
    }

    /// Keeps a row.
    pub(super) fn put(&mut self, id: i32, row: &[u8]) {
        if self.capacity == 0 || self.by_id.contains_key(&id) {
            return;
        }
        let slot = if self.links.len() < self.capacity {
            self.bytes.extend_from_slice(row);
            self.links.push(Link { id, newer: NONE, older: NONE });
            self.links.len() as u32 - 1
        } else {
            let slot = self.oldest;
            self.unlink(slot);
            self.by_id.remove(&self.links[slot as usize].id);
            self.links[slot as usize].id = id;
            let range = self.range(slot);
            self.bytes[range].copy_from_slice(row);
            slot
        };
        self.by_id.insert(id, slot);
        self.push_newest(slot);
    }

    fn range(&self, slot: u32) -> std::ops::Range<usize> {
        slot as usize * self.row_bytes..(slot as usize + 1) * self.row_bytes
    }

    fn unlink(&mut self, slot: u32) {
        let Link { newer, older, .. } = self.links[slot as usize];
        match newer {
            NONE => self.newest = older,
            n => self.links[n as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            o => self.links[o as usize].newer = newer,
        }
    }

    fn push_newest(&mut self, slot: u32) {
        let before = std::mem::replace(&mut self.newest, slot);
        let link = &mut self.links[slot as usize];
        (link.newer, link.older) = (NONE, before);
        match before {
            NONE => self.oldest = slot,
            b => self.links[b as usize].newer = slot,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_row_gives_way() {
        let mut cache = Cache::new(2, 7);
        let mut out = [0; 2];
        for id in 1..=3 {
            cache.put(id, &[id as u8; 2]);
        }
        assert!(cache.get(1, &mut out) && out == [1, 1]);
        cache.put(4, &[4; 2]);
        assert!(!cache.get(2, &mut out), "2 was the oldest");
        for id in [1, 3, 4] {
            assert!(cache.get(id, &mut out) && out == [id as u8; 2]);
        }
        cache.put(3, &[9; 2]);
        assert!(cache.get(3, &mut out) && out == [3, 3], "a row does not change");
        assert_eq!(cache.bytes.len(), 6, "three rows of two bytes fit seven");
    }

    #[test]
    fn no_room_at_all() {
        let mut cache = Cache::new(8, 7);
        cache.put(1, &[1; 8]);
        assert!(!cache.get(1, &mut [0; 8]));
    }

    /// Against a plain list, with random rows.
    #[test]
    fn equals_a_list() {
        let mut cache = Cache::new(1, 5);
        let mut list: Vec<i32> = Vec::new();
        let mut x = 1u32;
        for _ in 0..5000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let id = (x >> 16) as i32 % 9;
            let hit = cache.get(id, &mut [0]);
            assert_eq!(hit, list.contains(&id));
            list.retain(|&i| i != id);
            list.push(id);
            list.drain(..list.len().saturating_sub(5));
            cache.put(id, &[id as u8]);
        }
    }
}
