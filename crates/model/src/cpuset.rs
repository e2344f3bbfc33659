//! Sets of CPUs and of NUMA nodes, in the kernel's list syntax (`0-31,64-95`).
//!
//! Does not know which CPUs exist; it only does set arithmetic and text.
//!
//! *Invariant:* the words never end in a zero word, so equal sets compare equal; ids stay below
//! [`LIMIT`], so that no text can make a set larger than 8 KiB.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Ids at or above this are refused (the kernel's own largest `NR_CPUS` is 8192).
pub const LIMIT: u32 = 1 << 16;

/// Marks a set of logical CPUs.
#[derive(Clone, Copy, Debug)]
pub enum Cpu {}

/// Marks a set of NUMA nodes.
#[derive(Clone, Copy, Debug)]
pub enum Node {}

/// Logical CPUs, by the operating system's numbers.
pub type CpuSet = IdSet<Cpu>;

/// NUMA nodes, by the operating system's numbers.
pub type NodeSet = IdSet<Node>;

/// A set of small numbers of one kind.
pub struct IdSet<Kind> {
    words: Vec<u64>,
    kind: PhantomData<fn() -> Kind>,
}

/// Why a text is not a set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
#[non_exhaustive]
pub enum IdSetError {
    /// A part is neither a number nor a range.
    #[error("{part:?} is neither a number nor a range like 0-31")]
    Part {
        /// The part between commas.
        part: String,
    },
    /// A range runs backwards.
    #[error("range {part:?} runs backwards")]
    Backwards { part: String },
    /// An id is too large to be real.
    #[error("{id} is not below {LIMIT}")]
    TooLarge { id: u64 },
}

impl<Kind> IdSet<Kind> {
    /// The empty set.
    pub const fn new() -> Self {
        Self { words: Vec::new(), kind: PhantomData }
    }

    /// Adds `id` to the set.
    ///
    /// # Panics
    /// If `id` is not below [`LIMIT`]: callers check outside input first.
    pub fn insert(&mut self, id: u32) {
        assert!(id < LIMIT, "ids are checked against LIMIT where they enter");
        let word = id as usize / 64;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (id % 64);
    }

    /// Whether `id` is a member.
    pub fn contains(&self, id: u32) -> bool {
        self.words.get(id as usize / 64).is_some_and(|word| word & (1 << (id % 64)) != 0)
    }

    /// Number of members.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// The smallest member.
    pub fn first(&self) -> Option<u32> {
        self.iter().next()
    }

    /// Members in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.words.iter().zip(0u32..).flat_map(|(word, at)| {
            (0..64).filter(move |bit| word & (1 << bit) != 0).map(move |bit| at * 64 + bit)
        })
    }

    /// Members of both.
    pub fn intersection(&self, other: &Self) -> Self {
        Self::from_words(self.words.iter().zip(&other.words).map(|(a, b)| a & b).collect())
    }

    /// Members of either.
    pub fn union(&self, other: &Self) -> Self {
        let (long, short) =
            if self.words.len() >= other.words.len() { (self, other) } else { (other, self) };
        let mut words = long.words.clone();
        for (word, more) in words.iter_mut().zip(&short.words) {
            *word |= more;
        }
        Self::from_words(words)
    }

    /// Members of this set that are not in `other`.
    pub fn difference(&self, other: &Self) -> Self {
        let mut words = self.words.clone();
        for (word, less) in words.iter_mut().zip(&other.words) {
            *word &= !less;
        }
        Self::from_words(words)
    }

    /// Whether every member is in `other`.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.difference(other).is_empty()
    }

    /// Reads 32-bit hexadecimal words, highest first, as in sysfs `local_cpus` and NCCL's
    /// `affinity` (`0000ffff,00000000,0000ffff`).
    ///
    /// # Errors
    /// If a word is not one to eight hexadecimal digits, or the set would exceed [`LIMIT`].
    pub fn parse_mask(text: &str) -> Result<Self, IdSetError> {
        let mut set = Self::new();
        for (at, part) in (0u64..).zip(text.trim().rsplit(',')) {
            let digits = part.trim();
            let plain =
                (1..=8).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
            let word = plain.then(|| u32::from_str_radix(digits, 16).ok()).flatten();
            let word = word.ok_or_else(|| IdSetError::Part { part: clip(part) })?;
            for bit in (0..32u64).filter(|bit| word & (1 << bit) != 0) {
                set.insert(checked(at * 32 + bit)?);
            }
        }
        Ok(set)
    }

    /// Writes 32-bit hexadecimal words, highest first; the inverse of [`IdSet::parse_mask`].
    pub fn to_mask(&self) -> String {
        let halves: Vec<u64> =
            self.words.iter().flat_map(|word| [word & 0xffff_ffff, word >> 32]).collect();
        let used = halves.iter().rposition(|half| *half != 0).map_or(1, |last| last + 1);
        let words: Vec<String> =
            (0..used).rev().map(|at| format!("{:08x}", halves.get(at).unwrap_or(&0))).collect();
        words.join(",")
    }

    fn from_words(mut words: Vec<u64>) -> Self {
        let used = words.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
        words.truncate(used);
        Self { words, kind: PhantomData }
    }
}

fn checked(id: u64) -> Result<u32, IdSetError> {
    u32::try_from(id).ok().filter(|id| *id < LIMIT).ok_or(IdSetError::TooLarge { id })
}

fn clip(part: &str) -> String {
    part.chars().take(40).collect()
}

impl<Kind> FromStr for IdSet<Kind> {
    type Err = IdSetError;

    /// Reads the kernel's list syntax. An empty text is the empty set.
    fn from_str(text: &str) -> Result<Self, IdSetError> {
        let mut set = Self::new();
        if text.trim().is_empty() {
            return Ok(set);
        }
        for part in text.split(',').map(str::trim) {
            let number = |digits: &str| {
                let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
                plain.then(|| digits.parse::<u64>().ok()).flatten()
            };
            let (low, high) = part.split_once('-').unwrap_or((part, part));
            let (Some(low), Some(high)) = (number(low), number(high)) else {
                return Err(IdSetError::Part { part: clip(part) });
            };
            if low > high {
                return Err(IdSetError::Backwards { part: clip(part) });
            }
            let (low, high) = (checked(low)?, checked(high)?);
            (low..=high).for_each(|id| set.insert(id));
        }
        Ok(set)
    }
}

impl<Kind> fmt::Display for IdSet<Kind> {
    /// The kernel's list syntax: `0-31,64-95`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ids = self.iter().peekable();
        let mut separator = "";
        while let Some(low) = ids.next() {
            let mut high = low;
            while ids.next_if_eq(&(high + 1)).is_some() {
                high += 1;
            }
            if low == high {
                write!(f, "{separator}{low}")?;
            } else {
                write!(f, "{separator}{low}-{high}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

impl<Kind> fmt::Debug for IdSet<Kind> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

impl<Kind> Clone for IdSet<Kind> {
    fn clone(&self) -> Self {
        Self { words: self.words.clone(), kind: PhantomData }
    }
}

impl<Kind> PartialEq for IdSet<Kind> {
    fn eq(&self, other: &Self) -> bool {
        self.words == other.words
    }
}

impl<Kind> Eq for IdSet<Kind> {}

impl<Kind> Hash for IdSet<Kind> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.words.hash(state);
    }
}

impl<Kind> Default for IdSet<Kind> {
    fn default() -> Self {
        Self::new()
    }
}

impl<Kind> FromIterator<u32> for IdSet<Kind> {
    /// # Panics
    /// As [`IdSet::insert`].
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> Self {
        let mut set = Self::new();
        ids.into_iter().for_each(|id| set.insert(id));
        set
    }
}

impl<Kind> Serialize for IdSet<Kind> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de, Kind> Deserialize<'de> for IdSet<Kind> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl<Kind> schemars::JsonSchema for IdSet<Kind> {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "IdSet".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "pattern": "^([0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?$" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::btree_set;
    use proptest::prelude::*;

    fn set(text: &str) -> CpuSet {
        text.parse().expect(text)
    }

    #[test]
    fn the_kernels_list_syntax_reads_and_prints() {
        assert_eq!(set("0-31,64-95").len(), 64);
        assert_eq!(set("3, 1,2").to_string(), "1-3");
        assert_eq!(set("").to_string(), "");
    }

    #[test]
    fn damaged_lists_are_refused() {
        for text in
            ["-", "1-", "-1", "a", "1,,2", "5-3", "0-65536", "0-99999999999999999999", "N/A", "+1"]
        {
            assert!(text.parse::<CpuSet>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_mask_reads_its_highest_word_first() {
        assert_eq!(CpuSet::parse_mask("ff,00000000,0000000f"), Ok(set("0-3,64-71")));
        assert!(CpuSet::parse_mask("123456789").is_err());
        assert!(CpuSet::parse_mask("").is_err());
    }

    proptest! {
        #[test]
        fn a_set_survives_its_texts(ids in btree_set(0u32..4096, 0..64)) {
            let set: CpuSet = ids.iter().copied().collect();
            prop_assert_eq!(set.to_string().parse(), Ok(set.clone()));
            prop_assert_eq!(CpuSet::parse_mask(&set.to_mask()), Ok(set.clone()));
            prop_assert!(set.iter().eq(ids));
        }

        #[test]
        fn set_arithmetic_is_that_of_sets(a in btree_set(0u32..300, 0..40), b in btree_set(0u32..300, 0..40)) {
            let (x, y): (CpuSet, CpuSet) = (a.iter().copied().collect(), b.iter().copied().collect());
            prop_assert_eq!(x.union(&y), a.union(&b).copied().collect::<CpuSet>());
            prop_assert_eq!(x.intersection(&y), a.intersection(&b).copied().collect::<CpuSet>());
            prop_assert_eq!(x.difference(&y), a.difference(&b).copied().collect::<CpuSet>());
            prop_assert_eq!(x.is_subset(&y), a.is_subset(&b));
        }

        #[test]
        fn no_text_makes_the_parsers_panic(text in "[0-9a-f, -]{0,40}") {
            let _ = text.parse::<CpuSet>();
            let _ = CpuSet::parse_mask(&text);
        }
    }
}
