//! The recipe of this process: which options come from the file of `--recipe`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;

/// The recipe of this process, if it has one.
static RECIPE: OnceLock<Recipe> = OnceLock::new();

/// The options of a recipe, and the full list of arguments after merging them with the command line.
#[derive(Debug)]
pub(crate) struct Recipe {
    /// The file.
    pub path: PathBuf,
    /// Options that come from the file: long name and line number.
    pub options: Vec<(String, usize)>,
    /// All arguments of the command, with those of the file.
    pub arguments: Vec<OsString>,
}

/// Stores the recipe; called once, as a process parses its command line once.
pub(crate) fn store_recipe(recipe: Recipe) {
    let _ = RECIPE.set(recipe);
}

/// Returns the arguments for ranks, with the recipe as it was read by this process.
pub fn arguments() -> Option<Vec<OsString>> {
    RECIPE.get().map(|recipe| recipe.arguments.clone())
}

/// Returns the file and line of an option's value if it comes from the recipe; `option` is spelled as typed, with `--`.
pub fn origin(option: &str) -> Option<String> {
    let recipe = RECIPE.get()?;
    let (_, line) = recipe.options.iter().find(|(name, _)| option.strip_prefix("--") == Some(name))?;
    Some(format!("{}: line {line}", recipe.path.display()))
}
