//! One field of a request body: its name and value, read as a type within a range or refused by name.

use std::ops::RangeInclusive;

use simd_json::prelude::*;
use simd_json::tape::{Array, Object, Value};

use crate::api::error::{ApiError, excerpt};

/// A known field and what the body says of it.
#[derive(Clone, Copy)]
pub(super) struct Field<'tape, 'body> {
    pub(super) name: &'static str,
    pub(super) value: Value<'tape, 'body>,
}

impl<'tape, 'body> Field<'tape, 'body> {
    /// Returns the 400 that blames this field.
    pub(super) fn error(&self, what: &str) -> ApiError {
        ApiError::invalid(self.name, format!("'{}' {what}.", self.name))
    }

    /// Reads a string; null is `None`.
    pub(super) fn text(&self) -> Result<Option<&str>, ApiError> {
        self.optional(|value| value.as_str(), "must be a string")
    }

    /// Reads a boolean; null is `None`. Neither `1` nor `"true"` is one.
    pub(super) fn flag(&self) -> Result<Option<bool>, ApiError> {
        self.optional(|value| value.as_bool(), "must be true or false")
    }

    /// Reads a whole number; null is `None`. `1.0` and `true` are none.
    pub(super) fn integer(&self, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let what = || format!("must be an integer from {} to {}", range.start(), range.end());
        match self.present() {
            None => Ok(None),
            Some(value) => value
                .as_i64()
                .filter(|number| range.contains(number))
                .map(Some)
                .ok_or_else(|| self.error(&what())),
        }
    }

    /// Reads [`Self::integer`] of a range within `u32`.
    pub(super) fn count(&self, range: RangeInclusive<u32>) -> Result<Option<u32>, ApiError> {
        let range = i64::from(*range.start())..=i64::from(*range.end());
        Ok(self.integer(range)?.map(|number| u32::try_from(number).unwrap_or(u32::MAX)))
    }

    /// Reads a number; null is `None`. The range is checked before the value is narrowed, so 1e39 is out of it.
    pub(super) fn number(&self, range: RangeInclusive<f64>) -> Result<Option<f32>, ApiError> {
        let what = || format!("must be a number from {} to {}", range.start(), range.end());
        match self.present() {
            None => Ok(None),
            Some(value) => {
                let number = value.cast_f64().filter(|number| range.contains(number));
                number.map(|number| Some(number as f32)).ok_or_else(|| self.error(&what()))
            }
        }
    }

    /// Reads an object; null is `None`.
    pub(super) fn object(&self) -> Result<Option<Object<'tape, 'body>>, ApiError> {
        self.optional(|value| value.as_object(), "must be an object")
    }

    /// Reads a list; null is `None`.
    pub(super) fn list(&self) -> Result<Option<Array<'tape, 'body>>, ApiError> {
        self.optional(|value| value.as_array(), "must be a list")
    }

    /// Reads one of a few words; null is `None`.
    pub(super) fn word(&self, words: &[&'static str]) -> Result<Option<&'static str>, ApiError> {
        let Some(text) = self.text()? else { return Ok(None) };
        let found = words.iter().find(|word| **word == text).copied();
        found.map(Some).ok_or_else(|| {
            self.error(&format!("must be one of {}, not '{}'", words.join(", "), excerpt(text)))
        })
    }

    /// Reads a list of token ids below `vocab`; null is `None`.
    pub(super) fn token_ids(&self, vocab: u32) -> Result<Option<Vec<u32>>, ApiError> {
        self.list()?.map(|list| self.ids_of(&list, vocab)).transpose()
    }

    /// Reads the token ids of a list that belongs to this field.
    pub(super) fn ids_of(&self, list: &Array<'_, '_>, vocab: u32) -> Result<Vec<u32>, ApiError> {
        let id = |value: Value<'_, '_>| {
            let id = value.as_u32().filter(|id| *id < vocab);
            id.ok_or_else(|| self.error(&format!("must hold token ids from 0 to {}", vocab - 1)))
        };
        list.iter().map(id).collect()
    }

    /// Returns the value unless it is null.
    pub(super) fn present(&self) -> Option<Value<'tape, 'body>> {
        (!self.value.is_null()).then_some(self.value)
    }

    fn optional<'a, T>(
        &'a self,
        read: impl FnOnce(&'a Value<'tape, 'body>) -> Option<T>,
        what: &str,
    ) -> Result<Option<T>, ApiError> {
        if self.value.is_null() {
            return Ok(None);
        }
        read(&self.value).map(Some).ok_or_else(|| self.error(what))
    }
}

/// The names of unknown fields, for one line in the log: at most [`Self::COUNT_MAX`], each cut to an excerpt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnknownFields(Vec<String>);

impl UnknownFields {
    /// Most names kept of one request.
    pub const COUNT_MAX: usize = 16;

    /// Returns the names, each once, in the order of the body.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.0
    }

    pub(super) fn add(&mut self, name: &str) {
        let name = excerpt(name);
        if self.0.len() < Self::COUNT_MAX && !self.0.iter().any(|known| known == name) {
            self.0.push(name.to_owned());
        }
    }
}
