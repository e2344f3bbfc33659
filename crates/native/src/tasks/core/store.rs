//! Records by key, and objects also by name, in little memory: there are millions.
//!
//! Does not know what a record means.
//!
//! *Invariant:* `names` holds each object's key once, at the place of its name.

use std::hash::{BuildHasher, RandomState};
use std::ops::{Index, IndexMut};

use hashbrown::HashTable;
use slab::Slab;

use super::record::Object;
use super::{ObjectId, ObjectKey};

/// Records by key. A key is a small number, used again after the removal.
pub(super) struct Records<T>(Slab<T>);

impl<T> Records<T> {
    pub(super) fn new() -> Self {
        Self(Slab::new())
    }

    /// Adds a record. The scheduler's limits keep their number far below that of keys.
    pub(super) fn insert(&mut self, record: T) -> u32 {
        small(self.0.insert(record))
    }

    pub(super) fn get(&self, key: u32) -> Option<&T> {
        self.0.get(key as usize)
    }

    pub(super) fn remove(&mut self, key: u32) -> T {
        self.0.remove(key as usize)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.0.iter().map(|(key, record)| (small(key), record))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        self.0.iter_mut().map(|(key, record)| (small(key), record))
    }
}

fn small(key: usize) -> u32 {
    u32::try_from(key).unwrap_or(u32::MAX)
}

impl<T> Index<u32> for Records<T> {
    type Output = T;

    fn index(&self, key: u32) -> &T {
        &self.0[key as usize]
    }
}

impl<T> IndexMut<u32> for Records<T> {
    fn index_mut(&mut self, key: u32) -> &mut T {
        &mut self.0[key as usize]
    }
}

/// Objects by key and by name.
pub(super) struct Objects {
    records: Records<Object>,
    names: HashTable<ObjectKey>,
    /// Clients choose the names.
    hasher: RandomState,
}

impl Objects {
    pub(super) fn new() -> Self {
        Self { records: Records::new(), names: HashTable::new(), hasher: RandomState::new() }
    }

    /// Adds an object whose name is not in use.
    pub(super) fn insert(&mut self, object: Object) -> ObjectKey {
        let Self { records, names, hasher } = self;
        let hash = hasher.hash_one(object.id);
        let key = records.insert(object);
        names.insert_unique(hash, key, |other| hasher.hash_one(records[*other].id));
        key
    }

    pub(super) fn remove(&mut self, key: ObjectKey) -> Object {
        let hash = self.hasher.hash_one(self.records[key].id);
        if let Ok(found) = self.names.find_entry(hash, |other| *other == key) {
            found.remove();
        }
        self.records.remove(key)
    }

    /// The object of a name.
    pub(super) fn key(&self, id: ObjectId) -> Option<ObjectKey> {
        let is_it = |key: &ObjectKey| self.records[*key].id == id;
        self.names.find(self.hasher.hash_one(id), is_it).copied()
    }

    pub(super) fn get(&self, key: ObjectKey) -> Option<&Object> {
        self.records.get(key)
    }

    pub(super) fn len(&self) -> usize {
        self.records.len()
    }

    #[cfg(test)]
    pub(super) fn names(&self) -> usize {
        self.names.len()
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (ObjectKey, &Object)> {
        self.records.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (ObjectKey, &mut Object)> {
        self.records.iter_mut()
    }
}

impl Index<ObjectKey> for Objects {
    type Output = Object;

    fn index(&self, key: ObjectKey) -> &Object {
        &self.records[key]
    }
}

impl IndexMut<ObjectKey> for Objects {
    fn index_mut(&mut self, key: ObjectKey) -> &mut Object {
        &mut self.records[key]
    }
}
