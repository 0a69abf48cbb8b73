//! A page of sections with text, tables and plots of any numbers.

mod plot;
mod stacks;

use std::path::Path;

use askama::Template;

pub use plot::{Curve, Line, Plot};
pub use stacks::Stacks;

use crate::chart::Chart;
use crate::error::write_page;
use crate::page::{Colour, colours};
use crate::{Error, Result};

/// A page of sections, one below the other.
///
/// ```
/// use report::sheet::{Curve, Figure, Line, Plot, Section, Sheet};
///
/// let curve = Curve { name: "ddp".into(), points: vec![(1.0, 1.0), (2.0, 1.9)], line: Line::Solid, colour: 0 };
/// let plot = Plot { title: "Speed-up".into(), curves: vec![curve], ..Plot::default() };
/// let section = Section { heading: "Measured".into(), figures: vec![Figure::Plot(plot)], ..Section::default() };
/// let html = Sheet { title: "Scaling".into(), sections: vec![section], ..Sheet::default() }.render()?;
/// assert!(html.contains("<svg") && !html.contains("href"));
/// # Ok::<(), report::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sheet {
    /// Title.
    pub title: String,
    /// The command line that made it.
    pub command_line: String,
    /// Documentation on how to read the page.
    pub help: Option<Help>,
    /// Date and time in RFC 3339 format; see [`crate::now_rfc3339`].
    pub date: String,
    /// Host name.
    pub host: String,
    /// Further facts: name and value, in this order.
    pub facts: Vec<(String, String)>,
    /// The sections.
    pub sections: Vec<Section>,
}

/// A text that explains a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Help {
    /// Its name, for readers who cannot follow the link.
    pub name: String,
    /// Address for the link. `None`: only the name is displayed.
    pub address: Option<String>,
}

/// A section of a [`Sheet`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Section {
    /// Its heading.
    pub heading: String,
    /// Paragraphs.
    pub text: Vec<String>,
    /// Figures, in two columns if the page is wide enough. Figures without data are left out.
    pub figures: Vec<Figure>,
    /// Tables, below the figures.
    pub tables: Vec<Table>,
}

/// A figure.
#[derive(Debug, Clone, PartialEq)]
pub enum Figure {
    /// Curves.
    Plot(Plot),
    /// Stacked bars.
    Stacks(Stacks),
}

/// A table of text; the first cell of each row names it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Table {
    /// Caption; left out if empty.
    pub caption: String,
    /// Column headings.
    pub heads: Vec<String>,
    /// Rows, with as many cells as there are headings.
    pub rows: Vec<Vec<String>>,
}

impl Sheet {
    /// Renders the page: HTML with style and plots included. It loads nothing, and [`Sheet::help`] is its only link.
    /// All text is escaped.
    ///
    /// # Errors
    /// None that is known; errors of the drawing libraries are passed on.
    pub fn render(&self) -> Result<String> {
        let part = |section: &'_ Section| {
            let charts = section.figures.iter().map(Figure::chart).collect::<Result<Vec<_>>>();
            Ok(charts?.into_iter().flatten().collect())
        };
        let charts = self.sections.iter().map(part).collect::<Result<Vec<Vec<Chart>>>>()?;
        let parts = self.sections.iter().zip(charts).collect();
        let page = Page { report: self, colours: colours(), parts };
        page.render().map_err(|error| Error::Page { reason: error.to_string() })
    }

    /// Writes the page to a file.
    ///
    /// # Errors
    /// [`Error::Write`] with the path and the reason.
    pub fn write(&self, path: &Path) -> Result<()> {
        write_page(path, &self.render()?)
    }
}

impl Figure {
    fn chart(&self) -> Result<Option<Chart>> {
        match self {
            Self::Plot(plot) => plot.chart(),
            Self::Stacks(stacks) => stacks.chart(),
        }
    }
}

#[derive(Template)]
#[template(path = "sheet.html")]
struct Page<'a> {
    report: &'a Sheet,
    colours: Vec<Colour>,
    parts: Vec<(&'a Section, Vec<Chart>)>,
}

#[cfg(test)]
mod tests;
