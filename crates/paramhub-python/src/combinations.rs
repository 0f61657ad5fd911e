//! The table of what combines, for the Python package.

use paramhub_core::combinations::{self, Conflict, Feature, Features};
use paramhub_core::settings::Settings;
use pyo3::prelude::*;

use crate::errors;

/// Returns whether features, by their identifiers, combine with one another and with settings in JSON.
/// Returns nothing if they do, else the message for people, and the reason alone. InitService reports
/// settings that cannot be read.
#[pyfunction]
#[pyo3(signature = (features, settings = None))]
pub(crate) fn conflict(
    py: Python<'_>,
    features: Vec<String>,
    settings: Option<&str>,
) -> PyResult<Option<(String, &'static str)>> {
    let asked: Result<Features, String> = features.iter().map(|id| id.parse::<Feature>()).collect();
    let asked = asked.map_err(|problem| errors::misuse(py, &problem))?;
    let settings: Option<Settings> = settings.and_then(|text| serde_json::from_str(text).ok());
    let checked = match &settings {
        None => combinations::check(asked),
        Some(settings) => settings.check_with(asked).and_then(|()| settings.check_schemes_with(asked)),
    };
    Ok(checked.err().map(|conflict| (conflict.to_string(), conflict.rule.why)))
}

/// Refuses schemes that the Python package does not exchange, or that need a worker which `listens` for the
/// others.
pub(crate) fn check_schemes(settings: &Settings, listens: bool) -> Result<(), Conflict> {
    let here = Features::of([(Feature::PythonPackage, true), (Feature::NoPeerAddress, !listens)]);
    settings.check_schemes_with(here)
}
