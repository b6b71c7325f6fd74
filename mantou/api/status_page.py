"""The plain page at `/`: what runs here and where to look. Knows no data; it asks GET /stats itself."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>mantou</title>
<style>
  body { font: 1rem/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
  pre { background: #f3f3f3; color: #111; padding: 1rem; overflow-x: auto; }
</style>
</head>
<body>
<h1>mantou</h1>
<p>A language model server. The API is OpenAI's, at <code>/v1</code>.</p>
<ul>
  <li><a href="/v1">/v1</a>: all routes</li>
  <li><a href="/v1/models">/v1/models</a>: the model that answers</li>
  <li><a href="/stats">/stats</a>: what it does now</li>
  <li><a href="/downloads">/downloads</a>: downloads and loading</li>
  <li><a href="/library">/library</a>: models on this disk</li>
  <li><a href="/metrics">/metrics</a>: for Prometheus</li>
  <li><a href="/openapi.json">/openapi.json</a>: the API described</li>
</ul>
<h2>Now</h2>
<pre id="stats">Asking /stats ...</pre>
<script>
const box = document.getElementById("stats");
async function show() {
  try {
    const answer = await fetch("/stats");
    box.textContent = JSON.stringify(await answer.json(), null, 2);
  } catch (error) {
    box.textContent = "The server does not answer: " + error.message;
  }
}
show();
setInterval(show, 2000);
</script>
</body>
</html>
"""
