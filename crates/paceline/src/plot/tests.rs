//! Properties that every chart must have.

use super::*;
use crate::report::tests::left_open;

fn series(name: &str, colour: usize, values: &[f64]) -> Series {
    Series {
        name: name.to_owned(),
        colour,
        dash: 0,
        values: values.iter().map(|value| Some(*value).filter(|v| !v.is_nan())).collect(),
    }
}

fn numbers(values: &[f64]) -> Along {
    Along::Numbers(values.iter().map(|&value| Number { value, unit: Unit::Plain }).collect())
}

fn drawn(chart: &Chart) -> String {
    let svg = chart.to_svg();
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert_eq!(left_open(&svg), [""; 0]);
    svg
}

#[test]
fn every_value_is_a_mark_with_its_number() {
    let chart = Chart {
        title: Some("Rings & <servers>".to_owned()),
        x: numbers(&[8.0, 16.0, 32.0]),
        x_label: "ranks".to_owned(),
        y_label: "time".to_owned(),
        unit: Unit::Time,
        series: vec![
            series("ring", 0, &[1e-3, 1.1e-3, 1.2e-3]),
            series("ps", 1, &[1e-3, 2e-3, 4e-3]),
        ],
        log: [None, None],
    };
    let svg = drawn(&chart);
    assert_eq!(svg.matches("<circle").count(), 6);
    assert!(svg.contains("Rings &amp; &lt;servers&gt;") && svg.contains("time, ms"));
    assert!(svg.contains("<title>ps at 32: 4 ms</title>"), "{svg}");
    assert!(svg.contains(">32</text>"), "the bottom has the values themselves");
}

#[test]
fn a_gap_breaks_the_line() {
    let values = [1.0, 2.0, f64::NAN, 4.0];
    let x = numbers(&[1.0, 2.0, 3.0, 4.0]);
    let svg = drawn(&Chart { x, series: vec![series("a", 0, &values)], ..Chart::default() });
    let path = svg.split("class=\"line s0 d0\" d=\"").nth(1).unwrap().split('"').next().unwrap();
    assert_eq!((path.matches('M').count(), path.matches('L').count()), (2, 1));
}

#[test]
fn labels_at_the_ends_do_not_cover_each_other() {
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let close =
        names.iter().enumerate().map(|(i, name)| series(name, i, &[1.0, 1.0 + i as f64 / 99.0]));
    let svg =
        drawn(&Chart { x: numbers(&[1.0, 2.0]), series: close.collect(), ..Chart::default() });
    let mut heights: Vec<f64> = svg
        .lines()
        .filter(|line| line.starts_with("<text x="))
        .map(|line| line.split(" y=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap())
        .collect();
    heights.sort_by(f64::total_cmp);
    assert_eq!(heights.len(), 8);
    assert!(heights.windows(2).all(|pair| pair[1] - pair[0] > 15.0), "{heights:?}");
    assert!(heights.iter().all(|y| (0.0..HEIGHT).contains(y)));
}

#[test]
fn bars_are_as_high_as_their_values() {
    let words = ["a", "b"].map(str::to_owned).to_vec();
    let chart = Chart {
        x: Along::Words(words),
        series: vec![series("one", 0, &[1.0, 2.0]), series("two", 1, &[4.0, f64::NAN])],
        ..Chart::default()
    };
    let svg = drawn(&chart);
    let heights: Vec<f64> = svg
        .lines()
        .filter(|line| line.contains("<rect class=\"f") && !line.ends_with("</rect>"))
        .map(|line| {
            line.split(" height=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
        })
        .collect();
    assert_eq!(heights.len(), 3);
    assert!((heights[1] / heights[0] - 2.0).abs() < 0.01, "{heights:?}");
    assert!((heights[2] / heights[0] - 4.0).abs() < 0.01, "{heights:?}");
}

#[test]
fn anything_can_be_drawn() {
    for values in [vec![], vec![0.0], vec![f64::MAX, f64::MIN], vec![-1.0, 0.0, 1e-300, 1e300]] {
        let places: Vec<f64> = (0..values.len()).map(|i| i as f64).collect();
        for log in [Some(true), Some(false), None] {
            let words = places.iter().map(f64::to_string).collect();
            for x in [numbers(&places), Along::Words(words)] {
                let series = vec![series("\u{7}&", 0, &values)];
                drawn(&Chart { x, series, log: [log, log], ..Chart::default() });
            }
        }
    }
    drawn(&Chart::default());
}
