//! A table of fixed capacity whose keys outlive their values safely.

use crate::token::Key;

/// Values by slot; a slot's generation moves on with each tenant, so an old [`Key`] finds nothing.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    /// Grows up to `capacity`, never shrinks: rows that were never used cost no memory.
    rows: Vec<Row<T>>,
    free: Vec<u32>,
    capacity: u32,
}

#[derive(Debug)]
struct Row<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Slots<T> {
    /// Creates an empty table for at most `capacity` values.
    pub(crate) fn with_capacity(capacity: u32) -> Self {
        let rows = Vec::with_capacity(capacity as usize);
        Self { rows, free: Vec::with_capacity(capacity as usize), capacity }
    }

    /// Stores `value`, or hands it back when the table is full.
    pub(crate) fn insert(&mut self, value: T) -> Result<Key, T> {
        if let Some(index) = self.free.pop() {
            let row = &mut self.rows[index as usize];
            row.value = Some(value);
            return Ok(Key { index, generation: row.generation });
        }
        if self.rows.len() >= self.capacity as usize {
            return Err(value);
        }
        let index = self.rows.len() as u32;
        self.rows.push(Row { generation: 0, value: Some(value) });
        Ok(Key { index, generation: 0 })
    }

    /// Takes the value out; its key, and every copy of it, is dead from here on.
    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        let row = self.rows.get_mut(key.index as usize).filter(|row| row.generation == key.generation)?;
        let value = row.value.take()?;
        row.generation = (row.generation + 1) % Key::GENERATIONS;
        self.free.push(key.index);
        Some(value)
    }

    /// Returns the value if `key` is its own and not a former tenant's.
    pub(crate) fn find(&mut self, key: Key) -> Option<&mut T> {
        let row = self.rows.get_mut(key.index as usize)?;
        row.value.as_mut().filter(|_| row.generation == key.generation)
    }

    /// Returns the present tenant of a slot, with its key.
    pub(crate) fn tenant(&mut self, index: u32) -> Option<(Key, &mut T)> {
        let row = self.rows.get_mut(index as usize)?;
        let key = Key { index, generation: row.generation };
        row.value.as_mut().map(|value| (key, value))
    }

    /// Returns how many values are stored.
    pub(crate) fn len(&self) -> u32 {
        (self.rows.len() - self.free.len()) as u32
    }

    /// Returns how many slots were ever used: every tenant's index is below it.
    pub(crate) fn index_end(&self) -> u32 {
        self.rows.len() as u32
    }

    /// Returns whether [`Self::insert`] would fail.
    pub(crate) fn is_full(&self) -> bool {
        self.len() >= self.capacity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_dies_with_its_value() {
        let mut slots = Slots::with_capacity(1);
        let first = slots.insert('a').unwrap();
        assert_eq!(slots.remove(first), Some('a'));
        let second = slots.insert('b').unwrap();
        assert_eq!(second.index, first.index);
        assert_eq!(slots.find(first), None);
        assert_eq!(slots.remove(first), None);
        assert_eq!(slots.find(second), Some(&mut 'b'));
    }

    #[test]
    fn the_capacity_is_exact() {
        let mut slots = Slots::with_capacity(3);
        let keys: Vec<_> = (0..3).map(|n| slots.insert(n).unwrap()).collect();
        assert!(slots.is_full());
        assert_eq!(slots.insert(3), Err(3));
        assert_eq!(slots.remove(keys[1]), Some(1));
        assert!(!slots.is_full());
        assert_eq!(slots.len(), 2);
        assert_eq!(slots.insert(4).unwrap().index, 1);
        assert_eq!(slots.index_end(), 3);
    }

    #[test]
    fn generations_wrap_within_the_token() {
        let mut slots = Slots::with_capacity(1);
        let key = slots.insert(()).unwrap();
        slots.rows[0].generation = Key::GENERATIONS - 1;
        assert_eq!(slots.find(key), None);
        let last = Key { index: 0, generation: Key::GENERATIONS - 1 };
        slots.remove(last).unwrap();
        assert_eq!(slots.insert(()).unwrap().generation, 0);
    }
}
