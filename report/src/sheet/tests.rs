//! Tests of the page: all figures are drawn, and it loads nothing.

use super::*;

fn curve(points: Vec<(f64, f64)>, line: Line) -> Curve {
    Curve { name: "<ddp>".into(), points, line, colour: 7 }
}

fn sheet(figures: Vec<Figure>) -> Sheet {
    let (heads, rows) = (vec!["a".into(), "b".into()], vec![vec!["<c>".into(), "1".into()]]);
    let table = Table { caption: "<d>".into(), heads, rows };
    let (heading, text) = ("<h>".into(), vec!["<p>".into()]);
    let section = Section { heading, text, figures, tables: vec![table] };
    Sheet { title: "t".into(), sections: vec![section], ..Sheet::default() }
}

#[test]
fn every_figure_is_drawn_and_nothing_is_loaded() {
    let points = vec![(1., 1.), (2., 1.9), (4., 3.)];
    let lines = [Line::Solid, Line::Dashed, Line::Thin];
    let mut figures = Vec::new();
    for (by_factor, log) in [(false, false), (true, false), (true, true)] {
        let curves = lines.map(|line| curve(points.clone(), line)).to_vec();
        figures.push(Figure::Plot(Plot { by_factor, log, curves, ..Plot::default() }));
    }
    let bars = vec![("1 rank".into(), vec![1., 2.]), ("2 ranks".into(), vec![1., f64::NAN])];
    figures.push(Figure::Stacks(Stacks { parts: vec!["x".into(), "y".into()], bars, ..Stacks::default() }));
    let html = sheet(figures).render().unwrap();
    assert_eq!(html.matches("class=\"plot\"").count(), 4);
    assert_eq!(html.matches("<svg").count(), 5, "the broad one once more for a narrow page");
    assert!(html.contains("&#60;ddp&#62;") && html.contains("&#60;p&#62;") && html.contains("&#60;c&#62;"));
    assert!(html.contains("<h3>&#60;d&#62;</h3>"));
    let links = html.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
    for link in ["http", "href", "src=", "url(", "@import", "<script ", "<link", "<ddp>"] {
        assert!(!links.contains(link), "{link}");
    }
}

#[test]
fn what_has_no_data_is_left_out_and_strange_numbers_break_nothing() {
    let strange = [f64::NAN, f64::INFINITY, 0., -1., 1e-300, 1e300];
    for x in strange {
        for y in strange {
            for (by_factor, log) in [(false, false), (true, true)] {
                let curves = vec![curve(vec![(x, y)], Line::Solid), curve(vec![], Line::Dashed)];
                let plot = Plot { by_factor, log, curves, ..Plot::default() };
                sheet(vec![Figure::Plot(plot)]).render().unwrap();
            }
        }
    }
    let empty = vec![Figure::Plot(Plot::default()), Figure::Stacks(Stacks::default())];
    assert!(!sheet(empty).render().unwrap().contains("<svg"));
}

#[test]
fn help_is_a_link_where_it_has_an_address() {
    let with = |address: Option<&str>| {
        let help = Some(Help { name: "<guide>".into(), address: address.map(Into::into) });
        Sheet { help, ..sheet(vec![]) }.render().unwrap()
    };
    assert!(with(Some("../a.md#b\"")).contains("<a href=\"../a.md#b&#34;\">&#60;guide&#62;</a>"));
    let named = with(None);
    assert!(named.contains("&#60;guide&#62;") && !named.contains("href"));
}
