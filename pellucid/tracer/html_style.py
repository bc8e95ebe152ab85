"""The style sheet of the HTML report. Used by `html`."""

STYLE = """
:root { --paper:#fcfdfd; --tint:#f0f5f5; --line:#dde6e7; --ink:#14211f; --soft:#566769; --accent:#0a6c7c;
  --held:#1a6e3c; --failed:#a8261c; --warn:#8a5200; --hit:#fff3c4; --key:#7a2e8a; --text:#1a6e3c;
  --sans:system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans","DejaVu Sans",sans-serif;
  --mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono","DejaVu Sans Mono",monospace; }
@media (prefers-color-scheme: dark) {
  :root { --paper:#0e1415; --tint:#172022; --line:#263235; --ink:#e3eaea; --soft:#94a5a7; --accent:#6cc4d4;
    --held:#7fcf9d; --failed:#f2938b; --warn:#e3b06a; --hit:#3a3212; --key:#d3a2e0; --text:#7fcf9d; } }
* { box-sizing:border-box; }
body { max-width:1240px; margin:0 auto; padding:32px 20px 64px; background:var(--paper); color:var(--ink);
  font:15px/1.55 var(--sans); }
h1 { margin:0; font-size:24px; } h2 { margin:36px 0 8px; font-size:17px; } h3 { margin:16px 0 4px; font-size:13px; }
p { margin:4px 0; } ul { margin:4px 0; padding-left:20px; } small { color:var(--soft); }
code, pre, .field, .value, .place, .source, .log { font-family:var(--mono); font-size:13px; }
pre { margin:8px 0; padding:8px 12px; overflow-x:auto; background:var(--tint); }
.asked, .place, .file { color:var(--soft); }
.refusal { margin-top:12px; padding:8px 12px; border-left:3px solid var(--failed); background:var(--tint); }
details { border-top:1px solid var(--line); } details:last-of-type { border-bottom:1px solid var(--line); }
summary { display:grid; grid-template-columns:minmax(0,9fr) minmax(0,7fr) 62px minmax(0,11fr) minmax(0,7fr);
  gap:4px 14px; align-items:baseline; padding:6px 4px; cursor:pointer; list-style:none; }
summary::-webkit-details-marker { display:none; }
summary:hover, details[open] > summary { background:var(--tint); }
summary > span { overflow-wrap:anywhere; } summary .value { font-weight:600; } .kinds { text-align:right; }
details > div { padding:8px 4px 20px; }
.mark { margin-left:6px; color:var(--warn); } .how { color:var(--soft); font-size:13px; }
.how.forced { color:var(--accent); }
.how.unknown { color:var(--failed); } .how.flag { color:var(--held); }
.kind { margin-left:4px; padding:0 7px; border:1px solid var(--line); border-radius:9px; font-size:12px;
  color:var(--soft); } .kind.name, .kind.stub { color:var(--warn); border-color:var(--warn); }
.why { max-width:90ch; overflow-wrap:anywhere; } .file { margin-top:12px; font-size:13px; }
table { border-collapse:collapse; } .source { overflow-x:auto; background:var(--tint); } .source table { width:100%; }
.source th { padding:0 10px 0 8px; text-align:right; font-weight:400; color:var(--soft); user-select:none; }
.source td { padding:0 20px 0 0; white-space:pre; } .gap th { text-align:center; }
.source .hit { background:var(--hit); }
.source tr.hit td:first-of-type { font-weight:600; }
.source .seen { font-style:italic; } .source .held .seen { color:var(--held); }
.source .failed .seen { color:var(--failed); }
.source i { font-style:normal; } .k { color:var(--key); } .s { color:var(--text); } .c { color:var(--soft); }
.n { color:var(--accent); } .plain { padding:0; list-style:none; columns:3 260px; font:13px/1.7 var(--mono); }
.log th { text-align:left; font-weight:400; vertical-align:top; } .log td { padding:0 0 0 14px; vertical-align:top; }
details.far, details.far:last-of-type { border:0; } details.far > summary { display:block; color:var(--accent); }
@media (max-width:760px) { summary { grid-template-columns:1fr auto; } summary .place { grid-column:1 / -1; } }
"""
