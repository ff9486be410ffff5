// A page from the disk may not read other pages, so the search cannot show excerpts of them there.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
